"""What an unmodified trial's hooks see.

A module with a forward hook gets float32 and returns float32, so its hooks see what the
modules around it see. Hooks of a backward would see scaled gradients, so they are
refused under a loss scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

# has the hooks that are called for every module
from torch.nn.modules import (
    module as of_all,
)

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.fp32_modules import as_float32, write_back
from determined_amp.amp.patched import patched
from determined_amp.amp.torch_private import NODE_HOOKS
from determined_amp.trial.unmodified_autocast import (
    UnmodifiedAutocast,
    refuse_in_float16,
)

_BEFORE_FORWARD, _AFTER_FORWARD = "register_forward_pre_hook", "register_forward_hook"
_register_before = nn.Module.register_forward_pre_hook
_register_after = nn.Module.register_forward_hook

# What registers hooks of a backward, and keeps the gradient of a tensor that is no
# leaf. Those of `Module.register_backward_hook` are registered at nodes, in the next
# forward.
_OF_BACKWARDS: dict[Any, tuple[str, ...]] = {
    nn.Module: ("register_full_backward_pre_hook", "register_full_backward_hook"),
    torch.Tensor: (
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
    ),
    NODE_HOOKS[0]: (NODE_HOOKS[1],),
}

_OF_LEAVES = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
)

# The key of our own hook among those for every module; torch's keys are not negative.
_OURS = -1


class ForwardHooks:
    """Shows float32 to the trial's forward hooks.

    Args:
        models: The trial's models.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._shown: set[nn.Module] = set()
        # The casts of the inputs of each module that is running.
        self._casts: dict[nn.Module, list[tuple[Any, Any]]] = {}
        self._before_all = _hooks_beside(of_all.register_module_forward_pre_hook)
        self._after_all = _hooks_beside(of_all.register_module_forward_hook)
        self._undo = ExitStack()

    @contextmanager
    def shown_in_float32(self) -> Iterator[None]:
        """Show float32 in this block, also to hooks that come later."""
        with self._undo:
            for model in self._models:
                for module in model.modules():
                    if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                        self._show_to_hooks_of(module)
            for name in (_BEFORE_FORWARD, _AFTER_FORWARD):
                registering = _calling_first(self._meet, getattr(nn.Module, name))
                self._undo.enter_context(patched(nn.Module, name, registering))
            yield

    def show_to_hooks_of_all(self) -> None:
        """Called before each forward, for hooks that are called for every module."""
        self._put_first(self._before_all, self._cast_inputs)
        self._put_first(self._after_all, self._cast_output)

    def _meet(
        self, module: nn.Module, hook: Callable[..., Any], *_: Any, **__: Any
    ) -> None:
        if _is_the_trials(hook):
            self._show(module)

    def _show_to_hooks_of(self, module: nn.Module) -> None:
        for register in (_register_before, _register_after):
            if _any_of_the_trial(_hooks_beside(partial(register, module))):
                self._show(module)

    def _show(self, module: nn.Module) -> None:
        if module in self._shown:
            return
        self._shown.add(module)
        before = _register_before(
            module, self._cast_all_inputs, prepend=True, with_kwargs=True
        )
        after = _register_after(module, self._cast_output, prepend=True)
        self._undo.callback(before.remove)
        self._undo.callback(after.remove)

    def _put_first(self, hooks: Any, cast: Callable[..., Any]) -> None:
        if hooks and next(iter(hooks)) != _OURS and _any_of_the_trial(hooks):
            hooks[_OURS] = cast
            hooks.move_to_end(_OURS, last=False)
            self._undo.callback(hooks.pop, _OURS, None)

    def _cast_inputs(self, module: nn.Module, args: Any) -> Any:
        return self._cast_all_inputs(module, args, {})[0]

    def _cast_all_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        casts: list[tuple[Any, Any]] = []
        found = as_float32((args, kwargs), casts)
        if casts:  # else they may be those of a hook for every module
            self._casts[module] = casts
        return found

    def _cast_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        write_back(self._casts.pop(module, []))  # what the module wrote in place
        return as_float32(output)


class NoBackwardHooks:
    """Refuses the trial's hooks of a backward.

    Those of modules are met in the first backward, whoever has registered them.

    Args:
        parameters: All parameters of the trial.
        autocast: Knows whether a batch is trained.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], autocast: UnmodifiedAutocast
    ) -> None:
        self._parameters = parameters
        self._autocast = autocast

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse them in this block, and those of tensors that there are already.

        Raises:
            ConfigError: if there is such a hook.
        """
        for parameter in self._parameters:
            if parameter.requires_grad:
                self.refuse_hooks_of(parameter)
        with ExitStack() as stack:
            for owner, names in _OF_BACKWARDS.items():
                for name in names:
                    registering = _calling_first(self._refuse_one, getattr(owner, name))
                    stack.enter_context(patched(owner, name, registering))
            yield

    def refuse_hooks_of(self, leaf: torch.Tensor) -> None:
        """Refuse the hooks of a leaf of a graph, which may be in no model."""
        for register in _OF_LEAVES:
            if _any_of_the_trial(_hooks_beside(partial(register, leaf))):
                raise _refusal()

    def refuse_hook_of_module(self, kind: type) -> None:
        """Refuse a kind of node that calls the backward hooks of a module, or of all
        modules.
        """
        if kind.__name__ == "BackwardHookFunctionBackward":
            raise _refusal()

    def _refuse_one(self, owner: Any, hook: Any = None, *_: Any, **__: Any) -> None:
        if hook is not None and not _is_the_trials(hook):  # a compiler has hooks, too
            return
        if hook is None and owner.is_leaf:  # it retains its gradient anyway
            return
        outlives_the_batch = isinstance(owner, (nn.Module, nn.Parameter))
        if outlives_the_batch or self._autocast.training:
            raise _refusal()


def _refusal() -> ConfigError:
    return refuse_in_float16(
        "it has a hook in the backward or calls retain_grad, which would see scaled "
        "gradients"
    )


def _calling_first(
    function: Callable[..., None], method: Callable[..., Any]
) -> Callable[..., Any]:
    def call_both(owner: Any, *args: Any, **kwargs: Any) -> Any:
        function(owner, *args, **kwargs)
        return method(owner, *args, **kwargs)

    return call_both


def _hooks_beside(register: Callable[..., Any]) -> Any:
    """The hooks that a function has registered so far."""
    handle = register(_hook)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def _hook(*_: Any) -> None:
    """Does nothing."""


def _any_of_the_trial(hooks: Mapping[int, Callable[..., Any]]) -> bool:
    return any(_is_the_trials(hook) for hook in hooks.values())


def _is_the_trials(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the trial's own, and not one of torch, Determined or this
    library.
    """
    function = hook.func if isinstance(hook, partial) else hook
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", "")
    if name.startswith("register_multi_grad_hook.") or module == "torch.nn.functional":
        # torch's own around the trial's, and what torch does not register itself
        return True
    return module.partition(".")[0] not in ("torch", "determined", "determined_amp")
