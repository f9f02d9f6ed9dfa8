"""Reports every call of a torch clip function before it changes gradients.

torch has no hook for its clip functions. But all of them call one private function of
their module to group the gradients, however they were imported. We replace that
function while there is a listener.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.utils import clip_grad

from determined_amp.amp.torch_private import group_gradients, group_gradients_by


class Clip(NamedTuple):
    """A call of a torch clip function.

    Args:
        gradients: The gradients that it is about to clip.
        frames: The stack frames of torch's functions, innermost first.
    """

    gradients: list[torch.Tensor]
    frames: list[FrameType]


Listener = Callable[[Clip], None]

# Each listener in calling order, with the name of the module whose clips it ignores.
# The references are weak, so a listener ends with its training.
_listeners: list[tuple[weakref.WeakMethod[Listener], str | None]] = []


def listen_to_clips(
    listener: Listener, *, ignored_module: str | None = None
) -> Callable[[], None]:
    """Call a method before each clip, for as long as the method's object is alive.

    Args:
        listener: The method. It may raise an error to refuse the clip.
        ignored_module: The name of a module whose clips are not reported. Listeners
            with an `ignored_module` are called before listeners without one.

    Returns:
        A function that removes the listener.
    """

    def end(*_: object) -> None:
        if entry in _listeners:
            _listeners.remove(entry)
        if not _listeners:
            group_gradients_by(group_gradients)

    entry = (weakref.WeakMethod(listener, end), ignored_module)
    _listeners.insert(len(_listeners) if ignored_module is None else 0, entry)
    group_gradients_by(_tell_and_sort)
    return end


def _tell_and_sort(
    tensors: list[list[torch.Tensor]], *others: Any, **named: Any
) -> Any:
    """Tell the listeners, then group the gradients; torch's clip functions call it."""
    frame: Any = sys._getframe(1)
    frames: list[FrameType] = []
    while frame.f_globals is vars(clip_grad):
        frames.append(frame)
        frame = frame.f_back
    # The module's other functions only measure a norm.
    if any("clip_grad" in each.f_code.co_name for each in frames):
        clip, by = Clip(tensors[0], frames), frame.f_globals.get("__name__", "")
        for reference, ignored_module in list(_listeners):
            listener = reference()
            if listener is not None and by != ignored_module:
                listener(clip)
    return group_gradients(tensors, *others, **named)
