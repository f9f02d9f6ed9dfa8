"""Notices who changes gradients between a scaled backward and the step that unscales
them.

* torch's functions that clip are refused when they are called, whichever of the
  gradients they get and however they were imported: all of them sort their gradients by
  one function of their module, which is replaced while gradients are scaled.
* Any other change is right only if it is linear, as a mean or a mask is. The version
  counters of the gradients tell of it in the first ten steps, and in every tenth one
  after them: one warning, with the line of the step. Writes through `.data` have no
  counter.

Nothing here waits for the device.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from determined_amp.amp.tensors import parameters_in
from determined_amp.amp.torch_private import (
    call_after_backward,
    sort_gradients,
    sort_gradients_by,
    version_of,
)

logger = logging.getLogger(__name__)

# Where code is not the user's.
_NOT_THE_USERS = ("determined_amp", "determined", "torch")

# To note gradients costs the host some 20 us. Code that changes them does so in most
# steps.
_PERIOD = 10

# It clips what it has just unscaled.
_OUR_CLIP = "determined_amp.amp.steps"
_refusing: weakref.WeakSet[ScaledGradients] = weakref.WeakSet()


class ScaledGradients:
    """The gradients of a training between a scaled backward and its step.

    Args:
        refuse_clip: Called with the gradients that one of torch's functions is about to
            clip.
        optimizers: The optimizers of the training; more may come later.
        trained: Returns the parameters of the training, as long as it has no optimizer.

    Attributes:
        noted: The gradients after the newest backward and their versions, by their
            parameter; empty in most steps.
    """

    def __init__(
        self,
        refuse_clip: Callable[[Iterable[torch.Tensor]], None],
        optimizers: Sequence[Optimizer],
        trained: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self.refuse_clip = refuse_clip
        self._optimizers = optimizers
        self._trained = trained
        self.noted: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._steps = 0
        self._has_warned = False

    def begin(self, scaled: torch.Tensor) -> None:
        """A loss was scaled: refuse clips, and note the gradients when its backward has
        ended.
        """
        _refusing.add(self)
        sort_gradients_by(_refuse_clips)
        is_watched = self._steps < _PERIOD or self._steps % _PERIOD == 0
        if is_watched and scaled.requires_grad and not self._has_warned:
            register: Any = scaled.register_hook  # torch has no types here
            register(self._in_backward)

    def end(self) -> None:
        """A step has ended: no gradient is scaled any more."""
        self._steps += 1
        self.noted.clear()
        _refusing.discard(self)
        if not _refusing:
            sort_gradients_by(sort_gradients)

    def compare(self, parameters: Iterable[torch.Tensor]) -> None:
        """Warn if a gradient has changed since its backward; it is about to be
        divided.
        """
        has_changed = False
        for parameter in parameters:
            noted, gradient = self.noted.pop(parameter, None), parameter.grad
            if noted is not None and gradient is not None:
                before, version = noted
                has_changed |= gradient is not before or version_of(gradient) != version
        if has_changed and not self._has_warned:
            self._has_warned = True
            _warn()

    def _in_backward(self, gradient: torch.Tensor) -> None:
        call_after_backward(self._take_notes)

    def _take_notes(self) -> None:
        for parameter in parameters_in((), self._optimizers) or self._trained():
            gradient = parameter.grad
            if gradient is not None:
                self.noted[parameter] = gradient, version_of(gradient)


def _refuse_clips(tensors: list[list[torch.Tensor]], *others: Any, **named: Any) -> Any:
    """In place of the function that torch's clips sort their gradients by."""
    if not _refusing:  # a training that ended within a window is gone
        sort_gradients_by(sort_gradients)
    frame, clips = sys._getframe(1), False
    while frame.f_globals is vars(clip_grad):
        # and does not measure a norm
        clips |= frame.f_code.co_name.startswith("clip_grad")
        frame = frame.f_back  # type: ignore[assignment]
    if clips and frame.f_globals.get("__name__") != _OUR_CLIP:
        for scaled in list(_refusing):
            scaled.refuse_clip(tensors[0])
    return sort_gradients(tensors, *others, **named)


def _warn() -> None:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(
        _NOT_THE_USERS
    ):
        frame = frame.f_back
    logger.warning(
        "%s:%d: scaled gradients were changed between their backward and this step. "
        "That is right only if the change is linear, as a mean or a mask is; for "
        "anything else call amp.scaler.unscale_(optimizer) first",
        *(frame.f_code.co_filename, frame.f_lineno),
    )
