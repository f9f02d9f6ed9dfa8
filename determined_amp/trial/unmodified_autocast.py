"""The forward of a model whose code knows nothing of autocast.

It runs under autocast, and returns float32, which forward hooks of the trial see, too:
a loss may be computed from what they keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.fp32_modules import as_float32, write_back
from determined_amp.amp.patched import do_nothing, patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import tensors_of

_CONVERT = (
    "or write the AMP in the trial itself: docs/your_trial.md shows the ten lines"
)
NO_AMP = (
    "neither autocast nor a GradScaler: here both come from outside (det-amp "
    "check examines AMP of the trial's own if its YAML has no "
    "hyperparameters.amp)"
)


class UnmodifiedAutocast:
    """Runs a model's forward under autocast, and casts its results to float32.

    A copy of the model, such as an average of its weights, shares this object. A
    pickled model loses it, because it leaves the training.

    Args:
        amp: Makes the autocast of a training batch and that of a validation batch.

    Attributes:
        casts: Whether the precision has an autocast in 16 bits.
        training: Whether `train_batch` is running.
        in_backward: Whether a backward is running.
        took_leaf: Whether an input of a trained model was a leaf of the graph. Who
            reads it sets it back.
    """

    def __init__(self, amp: AmpCore) -> None:
        self._amp = amp
        self.casts = amp.settings.precision.autocast_dtype is not None
        self._inside = False
        self.training = False
        self.in_backward = False
        self.took_leaf = False

    def __call__(
        self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if self._inside:  # a wrapped model calls another one
            return forward(*args, **kwargs)
        is_on = autocast_is_on(self._amp.device.type)
        if self.in_backward and is_on:  # a checkpoint repeats such a call
            return forward(*args, **kwargs)
        if self.training and is_on:
            raise refusal("it enters autocast itself", NO_AMP)
        for tensor in tensors_of((args, kwargs)) if self.training else ():
            self.took_leaf |= tensor.requires_grad and tensor.is_leaf
        amp, self._inside = self._amp, True
        try:
            with amp.autocast() if self.training else amp.eval_autocast():
                output = forward(*args, **kwargs)
        finally:
            self._inside = False
            # Within a switched-off autocast of the trial, casts would outlive a step.
            torch.clear_autocast_cache()
        return as_float32(output) if self.casts else output

    def __deepcopy__(self, memo: object) -> UnmodifiedAutocast:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return partial, (_call,)


def _call(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


_REGISTERS = (nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook)


@contextmanager
def hooks_in_float32(models: Sequence[nn.Module]) -> Iterator[None]:
    """Show float32 to the trial's forward hooks in this block, also to later ones."""
    modules = {module for model in models for module in model.modules()}
    with ExitStack() as stack:
        for register in _REGISTERS:
            for module in modules:
                if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                    hooks = hooks_by(partial(register, module))
                    stack.callback(_put_back, hooks, dict(hooks))
                    hooks.update({key: _shown(hook) for key, hook in hooks.items()})
            showing = _showing_float32(register)
            stack.enter_context(patched(nn.Module, register.__name__, showing))
        yield


def _showing_float32(register: Callable[..., Any]) -> Callable[..., Any]:
    def registering(module: nn.Module, hook: Any, *args: Any, **kwargs: Any) -> Any:
        return register(module, _shown(hook), *args, **kwargs)

    return registering


def _shown(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A forward hook that sees float32, if it is the trial's own."""
    return partial(_call_in_float32, hook) if is_the_trials(hook) else hook


def _call_in_float32(hook: Callable[..., Any], module: nn.Module, *seen: Any) -> Any:
    casts: list[tuple[Any, Any]] = []
    result = hook(module, *as_float32(seen, casts))
    write_back(casts)  # what the hook has changed in place
    return result


def _put_back(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    hooks.update({key: before[key] for key in before.keys() & hooks.keys()})


def hooks_by(register: Callable[..., Any]) -> dict[int, Any]:
    """The hooks that a function has registered so far, by the ids of their handles."""
    handle = register(do_nothing)
    hooks: dict[int, Any] = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def is_the_trials(hook: Callable[..., Any]) -> bool:
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


def refusal(problem: str, instead: str) -> ConfigError:
    """The error for a trial that cannot be trained unmodified.

    Args:
        problem: What its `train_batch` does.
        instead: What to write.
    """
    return ConfigError(
        "the trial", [f"train_batch: {problem}; write instead: {instead}; {_CONVERT}"]
    )


def refuse_in_float16(problem: str) -> ConfigError:
    """The error for a trial that needs a precision without a loss scale.

    Args:
        problem: What its `train_batch` does.
    """
    return refusal(problem, "precision amp_bf16, which needs no loss scale")
