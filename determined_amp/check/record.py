"""What a training did, as plain data: it crosses from the process that trained to the doctor's."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from determined_amp.check.finding import Where

_LIBRARY = str(Path(__file__).parents[1]) + os.sep
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THE_USERS = (_LIBRARY, "<", *(path + os.sep for path in _PATHS if path))
# Also of packages for one user alone, as in a task of a cluster.
_INSTALLED = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
# What calls a trial: what it does by itself is not done by a line of the user's.
_LOOP = ("determined/pytorch/_pytorch_trial.py", "determined/pytorch/_trainer.py")


def is_users(file: str) -> bool:
    """Whether a file is neither this library's nor an installed package's."""
    return not (file.startswith(_NOT_THE_USERS) or any(part in file for part in _INSTALLED))


def frames() -> Iterator[FrameType]:
    """The frames that lead to the caller's caller, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_line() -> Where | None:
    """The line of the user's code that is being executed; None in code of others alone."""
    for frame in frames():
        if frame.f_code.co_filename.endswith(_LOOP):
            return None
        if is_users(frame.f_code.co_filename):
            return where_of(frame)
    return None


def where_of(frame: FrameType) -> Where:
    """The line at which a frame is."""
    return where_in(frame.f_code.co_filename, frame.f_lineno)


def where_in(path: str, line: int) -> Where:
    """A line of a file."""
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return Where(inside, line)


def passes(*ends: str) -> bool:
    """Whether a file of this library with such an end called what is being executed."""
    for frame in frames():
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY) and file.endswith(ends):
            return True
        if is_users(file):
            return False
    return False


@dataclass(frozen=True)
class Event:
    """Something that the training did.

    Args:
        number: Its place in the order of all events.
        kind: Such as `backward`, `clip`, `step`.
        where: The user's line; None if code of others did it.
        batch: The training batch that was running; -1 before the first.
        data: What is known of it, as plain values.
    """

    number: int
    kind: str
    where: Where | None
    batch: int
    data: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "data" not in self.__dict__:
            raise AttributeError(name)
        return self.data[name]


@dataclass
class Window:
    """What happened to one optimizer from the first backward after a step to its next ones.

    Args:
        optimizer: Its number.
        backwards: The backwards whose gradients it has.
        dropped: How often gradients were zeroed before any step used them.
        steps: What stepped it: through a scaler or not, and whether that was skipped.
        moves: What moved its schedulers until the next backward.
        forced: Whether the doctor made it overflow.
    """

    optimizer: int
    backwards: list[Event] = field(default_factory=list)
    dropped: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)
    forced: bool = False

    @property
    def skipped(self) -> bool:
        return bool(self.steps) and all(step.skipped for step in self.steps)


@dataclass
class Record:
    """What a training did.

    Args:
        events: In order.
        windows: In the order of their first backward.
        optimizers: Their class names.
        scalers: What is known of each `GradScaler`.
        schedulers: What is known of each scheduler.
        rates_set_at: Lines of the user's that set a learning rate without a scheduler.
        forwards: Forwards of modules with weights of their own that train: by whether autocast
            was on for their device.
        syncs: Reads of tensors on the host, by line and method.
        weights: Dtypes of the weights that optimizers have.
        epochs: How often an epoch of training ended.
        batches: Number of training batches.
        aggregation: Batches of one optimizer step that Determined counts; 1 elsewhere.
        averages: Whether Determined averages the gradients of those.
        states: By moment (`end`, `start`): scale of each scaler, place of each schedule.
        metrics: Validation metrics of the same weights: as they are, and in float32.
        error: What the training raised: its type, its text.
        raised: The user's line that raised it.
        has_cuda: Whether it ran on CUDA.
        determined: Whether it ran in Determined's loop.
        empty_scaler_state: Whether its checkpoint has the state of a disabled scaler.
        scales_of_ranks: What each update left, by rank; empty in one process.
    """

    events: list[Event] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    scalers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    rates_set_at: list[Where] = field(default_factory=list)
    forwards: Counter[bool] = field(default_factory=Counter)
    syncs: Counter[tuple[Where, str]] = field(default_factory=Counter)
    weights: Counter[str] = field(default_factory=Counter)
    epochs: int = 0
    batches: int = 0
    aggregation: int = 1
    averages: bool = True
    states: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    error: tuple[str, str] | None = None
    raised: Where | None = None
    has_cuda: bool = False
    determined: bool = False
    empty_scaler_state: bool = False
    scales_of_ranks: list[list[float]] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.kind in kinds]
