"""Runs the forward of a model under autocast if its code knows nothing of autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.fp32_modules import as_float32
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
        before_forward: Called before each forward.
    """

    def __init__(self, amp: AmpCore) -> None:
        self._amp = amp
        self.casts = amp.settings.precision.autocast_dtype is not None
        self._inside = False
        self.training = False
        self.in_backward = False
        self.took_leaf = False
        self.before_forward: Callable[[], None] | None = None

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
        if self.before_forward is not None:
            self.before_forward()
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
