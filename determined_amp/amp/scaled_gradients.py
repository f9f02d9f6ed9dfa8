"""Notices who changes gradients between a scaled backward and the step that unscales them.

* torch's functions that clip are refused when they are called, whichever of the gradients they get
  and however they were imported: all of them sort their gradients by one function of their module,
  which is replaced while gradients are scaled.
* Any other change is right only if it is linear, as a mean or a mask is. The version counter of one
  gradient of each optimizer, another one in each step, tells of it: one warning. Writes through
  `.data` have no counter.

Nothing here waits for the device.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

logger = logging.getLogger(__name__)

# Where code is not the user's.
_NOT_THE_USERS = ("determined_amp", "determined", "torch")

# torch exports no name of this module.
_module: Any = clip_grad
_by_device_and_dtype: Callable[..., Any] = _module._group_tensors_by_device_and_dtype
_refusing: weakref.WeakSet[ScaledGradients]


class ScaledGradients:
    """The gradients of a training between a scaled backward and its step.

    Args:
        refuse_clip: Called with the gradients that one of torch's functions is about to clip.
    """

    def __init__(self, refuse_clip: Callable[[Iterable[torch.Tensor]], None]) -> None:
        self.refuse_clip = refuse_clip
        self._watched: dict[Optimizer, torch.Tensor] = {}
        self._noted: dict[Optimizer, tuple[torch.Tensor, int]] = {}  # with its version
        self._turn = 0
        self._has_warned = False

    def begin(self, scaled: torch.Tensor) -> None:
        """A loss was scaled: refuse clips, and note the gradients when its backward has ended."""
        _refusing.add(self)
        _module._group_tensors_by_device_and_dtype = _refuse_clips
        if self._watched and not self._has_warned and scaled.requires_grad:
            register: Any = scaled.register_hook  # torch has no types here
            register(self._in_backward)

    def end(self) -> None:
        """No gradient is scaled any more."""
        self._noted.clear()
        _refusing.discard(self)
        if not _refusing:
            _module._group_tensors_by_device_and_dtype = _by_device_and_dtype

    def compare(self, optimizer: Optimizer) -> None:
        """Warn if a gradient has changed since its backward; its optimizer is about to use it."""
        noted = self._noted.pop(optimizer, None)
        gradient = self._watched[optimizer].grad if noted else None
        if noted is None or gradient is None or self._has_warned:
            return
        if gradient is not noted[0] or gradient._version != noted[1]:
            self._has_warned = True
            _warn(optimizer)

    def compare_before_division(self, parameters: Iterable[torch.Tensor]) -> None:
        """The same for the optimizers of parameters whose gradients the library divides now."""
        divided = set(map(id, parameters))
        for optimizer in list(self._noted):
            if id(self._watched[optimizer]) in divided:
                self.compare(optimizer)

    def watch(self, optimizer: Optimizer) -> None:
        """From its next step on, watch another gradient of an optimizer."""
        groups = optimizer.param_groups
        turn, number = divmod(self._turn, len(groups))
        parameters = groups[number]["params"]
        if parameters:
            self._watched[optimizer] = parameters[turn % len(parameters)]
        self._turn += 1

    def _in_backward(self, gradient: torch.Tensor) -> None:
        # DistributedDataParallel queues the end of its exchange, which this one must follow.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(self._take_notes))

    def _take_notes(self) -> None:
        gradients = ((each, parameter.grad) for each, parameter in self._watched.items())
        self._noted = {each: (it, it._version) for each, it in gradients if it is not None}


_refusing = weakref.WeakSet()


def _refuse_clips(tensors: list[list[torch.Tensor]], *others: Any, **named: Any) -> Any:
    """In place of the function that torch's clips sort their gradients by."""
    frame = sys._getframe(1)
    while frame.f_globals is vars(clip_grad):
        if frame.f_code.co_name.startswith("clip_grad"):  # and not to measure a norm
            for scaled in list(_refusing):
                scaled.refuse_clip(tensors[0])
            break
        frame = frame.f_back  # type: ignore[assignment]
    return _by_device_and_dtype(tensors, *others, **named)


def _warn(optimizer: Optimizer) -> None:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame = frame.f_back
    logger.warning(
        "the gradients of %s were changed while they were scaled, between their backward and the "
        "step in %s:%d. That is right only if the change is linear, as a mean or a mask is; for "
        "anything else call amp.scaler.unscale_(optimizer) first",
        *(type(optimizer).__name__, frame.f_code.co_filename, frame.f_lineno),
    )
