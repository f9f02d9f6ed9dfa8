"""Tells of every clip by torch before it changes gradients.

torch has no hook for its clips. All of its functions that clip sort their gradients by
one function of their module, however they were imported. That function is replaced
while anybody listens.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad

from determined_amp.amp.torch_private import sort_gradients, sort_gradients_by


class Clip(NamedTuple):
    """A call of a function of torch that clips.

    Args:
        gradients: The gradients that it is about to clip.
        frames: Those of torch's functions, the innermost first.
    """

    gradients: list[torch.Tensor]
    frames: list[FrameType]


Listener = Callable[[Clip], None]

# In the order in which they are told of a clip, each with the module of which it is not
# told. The references are weak: a listener ends with its training.
_listeners: list[tuple[weakref.WeakMethod[Listener], str | None]] = []


def listen_to_clips(
    listener: Listener, *, but_by: str | None = None
) -> Callable[[], None]:
    """Call a method before each clip, while the object of the method is alive.

    Args:
        listener: The method; it may refuse the clip by an error.
        but_by: The name of a module whose clips are right. A listener that names one
            is told before those that name none.

    Returns:
        What ends it.
    """

    def end(*_: object) -> None:
        if entry in _listeners:
            _listeners.remove(entry)
        if not _listeners:
            sort_gradients_by(sort_gradients)

    entry = (weakref.WeakMethod(listener, end), but_by)
    _listeners.insert(len(_listeners) if but_by is None else 0, entry)
    sort_gradients_by(_tell_and_sort)
    return end


def _tell_and_sort(
    tensors: list[list[torch.Tensor]], *others: Any, **named: Any
) -> Any:
    """In place of the function that torch's clips sort their gradients by."""
    frame: Any = sys._getframe(1)
    frames: list[FrameType] = []
    while frame.f_globals is vars(clip_grad):
        frames.append(frame)
        frame = frame.f_back
    # Others of these functions only measure a norm.
    if any(each.f_code.co_name.startswith("clip_grad") for each in frames):
        clip, by = Clip(tensors[0], frames), frame.f_globals.get("__name__", "")
        for reference, but_by in list(_listeners):
            listener = reference()
            if listener is not None and by != but_by:
                listener(clip)
    return sort_gradients(tensors, *others, **named)
