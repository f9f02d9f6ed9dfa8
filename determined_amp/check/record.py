"""What a training did, as plain data: it crosses from the process that trained to the
doctor's.

Each event has the line of the user's code that does it.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from determined_amp.amp.users_code import is_users
from determined_amp.check.finding import Where

_DOCTOR = str(Path(__file__).parent) + os.sep
_LIBRARY = str(Path(__file__).parents[1]) + os.sep
_RUNS_SCRIPTS = runpy.run_path.__code__.co_filename
# Torch's own forms of autocast, which call the one that all are.
_AUTOCAST = tuple(
    os.path.join("torch", *parts, "amp", "autocast_mode.py")
    for parts in ((), ("cuda",), ("cpu",))
)
# What calls a trial: what it does by itself is not done by a line of the user's.
_LOOP = ("determined/pytorch/_pytorch_trial.py", "determined/pytorch/_trainer.py")


class Event(SimpleNamespace):
    """Something that the training did.

    Each has its `number` in the order of all, its `kind`, the user's line `where` (None
    if code of others alone did it) and its `batch` (-1 before the first). What else is
    known of it:

    | kind | what is known |
    |---|---|
    | `backward` | its `loss`; whether the step of an optimizer makes it (`in_step`); |
    | | whether it runs under `autocast`; whether the loss is |
    | | `finite`; how many optimizers it `reached`; the norm that it `added`; the |
    | | largest `scale` then; whether a scaler has `divided` its gradients |
    | `grad` | the `loss` of a `torch.autograd.grad` |
    | `left_out` | a batch with a loss that is not finite, and no backward |
    | `unscale` | |
    | `clip` | the argument that limits (`of`), the `limit`, the `norm` before, and |
    | | the `factor` of the gradients |
    | `zero_grad` | |
    | `step` | the number of the `optimizer`; whether a scaler makes it (`scaled`), |
    | | whether it is `skipped`, or made `again` with the same gradients; the `norm` |
    | | that it used, the `norms` of each weight's, and the norm before a clip |
    | | (`unclipped`); what was `added` to scaled gradients; their `factor`, and what |
    | | the training multiplied them by (`by_hand`); whether the scaler has `divided` |
    | | them; the `rates` of the groups, and the first (`rate`); whether its float32 |
    | | weights were `rounded` before; the `scale`; whether the doctor `disturbed` |
    | | gradients since the newest update, and whether the step would have used its |
    | | overflow (`overflows`); whether a checkpoint was saved before (`after_save`); |
    | | the `scaler`, if one makes it |
    | `read` | a loss that was scaled becomes a number of Python's |
    | `stale` | a forward of weights that autocast had cast before they changed |
    | `closure` | a scaler is given one for its step |
    | `update` | the scale `after` it |
    | `move` | the `schedule`, and whether it was told its `place` |
    | `autocast`, `autocast_off` | the `dtype`; whether with `grad`, and `in_batch` |
    | `hide` | `nan_to_num` of what has no gradient |
    | `cast` | weights of a module were cast to a 16-bit `dtype` |
    | `gpu_refuses` | an `operation` without a 16-bit kernel on CUDA |
    | `save` | whether the state of an `optimizer` is saved, and a `scale` |
    """


@dataclass(eq=False)
class Scaler:
    """What is known of a `GradScaler`."""

    where: Where | None  # the line that made it
    enabled: bool
    ours: bool  # it is this library's
    used: bool = False  # it scaled a loss
    # Its scale when it was `saved`, and when it was `resumed`; 0 if it is not enabled.
    states: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Schedule:
    """What is known of a scheduler."""

    kind: str  # the name of its class
    where: Where | None  # the line that made it
    optimizer: int  # the number of its optimizer
    ours: bool = False  # this library moves it
    states: dict[str, Any] = field(default_factory=dict)  # its place, as with a scaler


@dataclass(eq=False)
class StepWindow:
    """What happened to one optimizer from the first backward after a step to its next
    ones.
    """

    optimizer: int  # its number
    place: int = 0  # among its windows, from 1
    backwards: list[Event] = field(default_factory=list)  # whose gradients it has
    # Backwards whose gradients were zeroed before any step used them.
    lost: int = 0
    zeroed: list[Event] = field(default_factory=list)  # by these
    # Its first backward was added to gradients that an earlier step has used.
    stale: bool = False
    left_out: bool = False  # its gradients were unscaled, and no step has used them
    unscales: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    # of its schedulers until the next backward
    moves: list[Event] = field(default_factory=list)
    forced: bool = False  # the doctor made it overflow
    # Code of the user's has written other values into its gradients, not a multiple.
    rewritten: bool = False
    by_hand: float = 1.0  # what code of the user's has multiplied their norm by
    added: float = 0.0  # the norm of what it has added to scaled ones, unscaled
    unclipped: float | None = None  # the norm that the scaler left

    @property
    def used(self) -> list[Event]:
        """The backwards whose gradients a step uses."""
        return self.backwards[self.lost :]

    @property
    def is_empty(self) -> bool:
        """Whether all of its gradients were zeroed."""
        return bool(self.lost) and not self.used

    @property
    def skipped(self) -> bool:
        return all(step.skipped for step in self.steps)

    @property
    def is_scaled(self) -> bool:
        """Whether a scaler makes one of its steps."""
        return any(step.scaled for step in self.steps)

    @property
    def scales(self) -> set[float]:
        """What multiplied its gradients, and what the scaler divides them by."""
        steps = [step.scale for step in self.steps[:1] if step.scaled]
        scaled = {each.loss.scale for each in self.used if each.loss.scale}
        return scaled.union(steps if scaled else [])

    @property
    def unscaled_early(self) -> list[Event]:
        """What has divided gradients to which scaled ones were added then."""
        scaled = [each.number for each in self.used if each.loss.scale] or [0]
        return [each for each in self.unscales if scaled[0] < each.number < scaled[-1]]

    @property
    def moved(self) -> list[Schedule]:
        """The schedules that move after its last backward, without a place."""
        last = self.used[-1].number if self.used else 0
        return [
            move.schedule
            for move in self.moves
            if move.number > last and not move.place
        ]


@dataclass(frozen=True)
class Cause:
    """Why a loss, or its gradients, are not finite."""

    text: str
    where: Where | None  # the line whose operation makes it so
    advice: str
    is_of_loss: bool = True  # else of gradients alone


@dataclass
class Record:
    """What a training did."""

    determined: bool = False  # it ran in Determined's loop
    lacks_cuda: bool = False  # it asks for CUDA on a machine without a GPU
    events: list[Event] = field(default_factory=list)
    # in the order of their first backward
    windows: list[StepWindow] = field(default_factory=list)
    scalers: list[Scaler] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    optimizers: int = 0
    # their dtypes, where an optimizer has stepped
    weights: set[str] = field(default_factory=set)
    batches: int = 0  # of the training
    epochs: int = 0  # that ended
    # Forwards of modules with weights of their own that train: by whether autocast was
    # on for them.
    forwards: Counter[bool] = field(default_factory=Counter)
    # Validation metrics of the same weights: as they are, and in float32.
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    # weights and buffers, at the end
    not_finite: list[str] = field(default_factory=list)
    # Modules that run whose weights an optimizer holds and no gradient reaches: each
    # as often as it has such weights.
    cut_off: list[str] = field(default_factory=list)
    # Of a forward without gradients that is not finite, and is in float32.
    validation: Cause | None = None
    cause: Cause | None = None  # of a loss that is not finite
    hidden: Cause | None = None  # an overflow in a forward whose loss is finite
    # A cast that changes whole numbers: the largest, and the line.
    rounded: tuple[str, Where | None] | None = None
    error: str = ""  # what was raised: its type and its text
    raised: Where | None = None  # by which line
    disturbed: bool = False  # when the doctor had made gradients overflow
    forces_none: bool = False  # the doctor has made none, as one raised before
    saved: bool = False  # a checkpoint was made

    def note(self, kind: str, **known: Any) -> Event:
        """Add an event that the line of the user's does which is being executed."""
        place = {
            "number": len(self.events),
            "where": users_line(),
            "batch": self.batches - 1,
        }
        event = Event(kind=kind, **place, **known)
        self.events.append(event)
        return event

    def of(self, kind: str, **known: Any) -> list[Event]:
        """The events of a kind of which this is known."""
        its = [event for event in self.events if event.kind == kind]
        wanted = known.items()
        return [event for event in its if wanted <= vars(event).items()]

    @property
    def regions(self) -> list[Event]:
        """Regions of autocast that the training was in."""
        return self.of("autocast", grad=True)

    @property
    def regions_of_validation(self) -> list[Event]:
        """Those that a validation was in."""
        return self.of("autocast", grad=False, in_batch=False)

    @property
    def scales(self) -> bool:
        """Whether a loss is scaled."""
        return any(scaler.enabled and scaler.used for scaler in self.scalers)

    @property
    def is_amp(self) -> bool:
        """Whether it has autocast or scales a loss."""
        return bool(self.regions) or self.scales

    @property
    def steps_of_each(self) -> list[int]:
        """How many steps each optimizer that steps has made."""
        return [*Counter(step.optimizer for step in self.of("step")).values()]

    @property
    def first_line_of_error(self) -> str:
        return self.error.partition("\n")[0]

    @property
    def complete(self) -> list[StepWindow]:
        """Windows that a step has ended."""
        return [window for window in self.windows if window.steps]

    @property
    def undisturbed(self) -> list[StepWindow]:
        """Those of them in which the doctor made no overflow."""
        return [window for window in self.complete if not window.forced]


# Which line of the user's code does something.


def is_doctors(file: str) -> bool:
    """Whether a file is one of this package, or runs a script for it: no user wants to
    see them.
    """
    return file.startswith(_DOCTOR) or file == _RUNS_SCRIPTS


def users_line() -> Where | None:
    """The line of the user's code that is being executed; None in code of others
    alone.
    """
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.endswith(_LOOP):
            return None
        if is_users(file):
            return where_in(file, line)
    return None


def caller() -> FrameType:
    """The frame that makes the call which a hook of this package sees."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next(frame for frame in frames if not _is_passed(frame.f_code.co_filename))


def _is_passed(file: str) -> bool:
    """Whether a file is the doctor's, or one of torch in which autocast is entered."""
    return is_doctors(file) or file.endswith(_AUTOCAST)


def called_by_library() -> bool:
    """Whether the rest of this library makes that call."""
    return caller().f_code.co_filename.startswith(_LIBRARY)


def where_in(path: str, line: int) -> Where:
    """A line of a file."""
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return Where(inside, line)


def where_raised(error: BaseException) -> Where | None:
    """The innermost line of the user's that an error has come through."""
    where = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            where = where_in(frame.f_code.co_filename, line)
    return where
