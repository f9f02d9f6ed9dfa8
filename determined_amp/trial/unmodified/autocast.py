"""Autocast for a model whose code knows nothing of it.

The forward runs under autocast, and returns float32. A module with a forward hook of
the trial gets and returns float32, so the hook sees float32.
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
    pickled model loses it, because that model leaves the training.

    Args:
        amp: Makes the autocast contexts of training and validation batches.

    Attributes:
        casts: Whether the precision has an autocast in 16 bits.
        training: Whether `train_batch` is running.
        in_backward: Whether a backward is running.
    """

    def __init__(self, amp: AmpCore) -> None:
        self._amp = amp
        self.casts = amp.settings.precision.autocast_dtype is not None
        self._inside = False
        self.training = False
        self.in_backward = False

    def __call__(
        self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if self._inside:  # a wrapped model calls another one
            return forward(*args, **kwargs)
        is_on = autocast_is_on(self._amp.device.type)
        if self.in_backward and is_on:  # a checkpoint repeats a call under our autocast
            return forward(*args, **kwargs)
        if self.training and is_on:
            raise refusal("it enters autocast itself", NO_AMP)
        amp, self._inside = self._amp, True
        try:
            with amp.autocast() if self.training else amp.eval_autocast():
                output = forward(*args, **kwargs)
        finally:
            self._inside = False
            # In a disabled autocast region of the trial, casts would outlive a step.
            torch.clear_autocast_cache()
        return as_float32(output) if self.casts else output

    def __deepcopy__(self, memo: object) -> UnmodifiedAutocast:
        return self

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        return partial, (_call,)


def _call(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


_register_before = nn.Module.register_forward_pre_hook
_register_after = nn.Module.register_forward_hook


class ForwardHooks:
    """Lets the trial's forward hooks see float32.

    Args:
        models: The trial's models.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._shown: set[nn.Module] = set()
        # The casts of the inputs of each module that is running.
        self._casts: dict[nn.Module, list[tuple[Any, Any]]] = {}
        self._undo = ExitStack()

    @contextmanager
    def shown_in_float32(self) -> Iterator[None]:
        """Show float32 to hooks in this block, also to those registered in it."""
        with self._undo:
            for model in self._models:
                for module in model.modules():
                    if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                        self._show_to_hooks_of(module)
            for register in (_register_before, _register_after):
                registering = calling_first(self._meet, register)
                patch = patched(nn.Module, register.__name__, registering)
                self._undo.enter_context(patch)
            yield

    def _meet(
        self, module: nn.Module, hook: Callable[..., Any], *_: Any, **__: Any
    ) -> None:
        if is_the_trials(hook):
            self._show(module)

    def _show_to_hooks_of(self, module: nn.Module) -> None:
        for register in (_register_before, _register_after):
            if has_hook_of_trial(partial(register, module)):
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

    def _cast_all_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        casts = self._casts[module] = []
        return as_float32((args, kwargs), casts)

    def _cast_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        write_back(self._casts.pop(module, ()))  # what the module wrote in place
        return as_float32(output)


def calling_first(
    function: Callable[..., None], method: Callable[..., Any]
) -> Callable[..., Any]:
    def call_both(owner: Any, *args: Any, **kwargs: Any) -> Any:
        function(owner, *args, **kwargs)
        return method(owner, *args, **kwargs)

    return call_both


def has_hook_of_trial(register: Callable[..., Any]) -> bool:
    """Whether the trial has a hook where this function registers hooks."""
    handle = register(do_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return any(map(is_the_trials, hooks.values()))


def is_the_trials(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the trial's, not one of torch, Determined or this library."""
    function = hook.func if isinstance(hook, partial) else hook
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", "")
    if name.startswith("register_multi_grad_hook.") or module == "torch.nn.functional":
        # torch's wrapper of a trial's hook, or a function that torch never registers
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
