"""Shows the hooks of a trial what they would see in float32 without a loss scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from determined_amp.amp.core import AmpCore
from determined_amp.amp.fp32_modules import as_float32, write_back
from determined_amp.amp.patched import patched
from determined_amp.amp.tensors import parameters_in
from determined_amp.trial.outer_autocast import OuterAutocast, mark_casts, source_of
from determined_amp.trial.true_gradients import TrueGradients, are_finite, by_kind, inverse


@contextmanager
def converted_hooks(
    amp: AmpCore, autocast: OuterAutocast, gradients: TrueGradients | None
) -> Iterator[None]:
    """Give float32 and true gradients to the trial's hooks in this block, also to later ones.

    Args:
        amp: The trial's mixed precision, with all models and optimizers.
        autocast: Knows whether the models compute in 16 bits, and whether a batch is trained.
        gradients: The true gradients; None without a loss scale.
    """
    of_all = nn.modules.module  # has the hooks that are called for every module
    holders: dict[Any, Sequence[Any]] = {
        nn.Module: [module for model in amp.models for module in model.modules()],
        torch.Tensor: parameters_in(amp.models, amp.optimizers),
        of_all: [of_all],
    }
    kinds: list[tuple[Any, str, str, Any]] = []
    if autocast.casts:
        to_float32 = partial(partial, _in_float32)
        for kind in ("forward", "forward_pre"):
            kinds += [
                (nn.Module, f"register_{kind}_hook", f"_{kind}_hooks", to_float32),
                (of_all, f"register_module_{kind}_hook", f"_global_{kind}_hooks", to_float32),
            ]
        true = partial(partial, _on_true, gradients)
        for kind in ("full_backward", "full_backward_pre", "backward"):
            hooks_of_kind = f"_{kind.removeprefix('full_')}_hooks"
            kinds += [
                (nn.Module, f"register_{kind}_hook", hooks_of_kind, true),
                (of_all, f"register_module_{kind}_hook", f"_global{hooks_of_kind}", true),
            ]
        kinds.append((torch.Tensor, "register_hook", "_backward_hooks", true))
    if gradients is not None:
        of_leaf = partial(partial, _on_true_leaf, gradients)
        of_leaves = "register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks"
        kinds.append((torch.Tensor, *of_leaves, of_leaf))
    with ExitStack() as patches:
        if autocast.casts:
            retain = _retaining(torch.Tensor.retain_grad, autocast, gradients)
            patches.enter_context(patched(torch.Tensor, "retain_grad", retain))
        for owner, register, attribute, convert in kinds:
            for it in holders[owner]:
                hooks = getattr(it, attribute, None) or {}
                own = {key: hook for key, hook in hooks.items() if _is_the_trials(hook)}
                hooks.update({key: convert(hook) for key, hook in own.items()})
                patches.callback(_put_back, hooks, own)
            registering = _registering(
                getattr(owner, register), convert, is_method=owner is not of_all
            )
            patches.enter_context(patched(owner, register, registering))
        yield


def _put_back(hooks: dict[int, Any], own: dict[int, Any]) -> None:
    """Let the hooks that are still there be the trial's own again."""
    hooks.update({key: hook for key, hook in own.items() if key in hooks})


def _retaining(
    retain_grad: Callable[..., Any], autocast: OuterAutocast, gradients: TrueGradients | None
) -> Callable[..., Any]:
    def retain(tensor: torch.Tensor) -> None:
        retain_grad(tensor)
        source = source_of(tensor)
        if source is not None:
            retain_grad(source)
            autocast.wanted[tensor] = source
        if autocast.training and gradients is not None:
            gradients.retain(tensor)

    return retain


def _registering(
    register: Callable[..., Any], convert: Callable[..., Any], *, is_method: bool
) -> Callable[..., Any]:
    def method(it: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        source = source_of(it)  # which all gradients of a cast go through
        it = it if source is None else source
        return register(it, convert(hook) if _is_the_trials(hook) else hook, *args, **kwargs)

    def function(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return register(convert(hook) if _is_the_trials(hook) else hook, *args, **kwargs)

    return method if is_method else function


def _is_the_trials(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the trial's own, and not one of torch, Determined or this library."""
    function = hook.func if isinstance(hook, partial) else hook
    module = getattr(function, "__module__", None) or type(function).__module__
    if getattr(function, "__qualname__", "").startswith("register_multi_grad_hook."):
        return True  # torch's own around the trial's
    return module.partition(".")[0] not in ("torch", "determined", "determined_amp")


def _in_float32(hook: Callable[..., Any], /, *args: Any) -> Any:
    """Call a hook of a forward, and keep what it changes in place."""
    replaced: list[tuple[Any, Any]] = []
    cast = as_float32(args, replaced)
    mark_casts(replaced)
    result = hook(*cast)
    if result is None:
        write_back(replaced, untraced=True)
    return result


def _on_true(gradients: TrueGradients | None, hook: Callable[..., Any], /, *args: Any) -> Any:
    """Call the hook of a tensor, or that of a module, which gets the module first."""
    scale = None if gradients is None else gradients.scale
    ours = 1 if isinstance(args[0], nn.Module) else 0
    factor = 1.0 if scale is None else inverse(scale)
    true = [_each(lambda gradient: as_float32(gradient) * factor, value) for value in args]
    result = hook(*true)
    if result is None:
        result = true[ours]  # which it may have changed in place
    if scale is None:
        return _each(lambda new, old: new.to(old.dtype), result, args[ours])
    # A hook may turn infinity into a finite number, but the overflow must not be lost.
    scaled: list[torch.Tensor] = []
    _each(scaled.append, args[ours:])
    back = torch.where(are_finite(scaled or [scale]), scale, math.nan)
    return _each(lambda new, old: (new * back).to(old.dtype), result, args[ours])


def _on_true_leaf(
    gradients: TrueGradients | None, hook: Callable[..., Any], /, leaf: torch.Tensor
) -> None:
    scale = None if gradients is None else gradients.scale
    if scale is None or leaf.grad is None:  # an earlier hook of the leaf may have dropped it
        hook(leaf)
        return
    ((_, _, values),) = by_kind([leaf])
    finite = are_finite(values)
    torch._foreach_mul_(values, inverse(scale))
    hook(leaf)
    for _, _, values in by_kind([leaf]):
        torch._foreach_mul_(values, torch.where(finite, scale, math.nan))


def _each(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Call a function with each tensor of nested tuples, and with its counterparts in others."""
    if isinstance(value, (tuple, list)):
        return tuple(_each(function, *items) for items in zip(value, *others, strict=True))
    return function(value, *others) if isinstance(value, torch.Tensor) else value
