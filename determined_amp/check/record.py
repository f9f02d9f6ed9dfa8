"""What a training did, as plain data.

`recorder.py` and its helpers fill a `Record`, and the rules and `judge.py` read it. A
trial runs in a process of its own, which sends its record to the doctor's process. Each
event names the line of the user's code that caused it; the functions at the end of this
module find that line.
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
# Files of torch whose autocast classes call `torch.autocast`.
_AUTOCAST = tuple(
    os.path.join("torch", *parts, "amp", "autocast_mode.py")
    for parts in ((), ("cuda",), ("cpu",))
)
# Determined's loop, which calls the trial. What the loop does itself has no line of the
# user's code, although a script of the user's may have started the loop.
_LOOP = ("determined/pytorch/_pytorch_trial.py", "determined/pytorch/_trainer.py")


class Event(SimpleNamespace):
    """Something that the training did.

    Each event has a `number`, which counts all events, a `kind`, the user's line
    `where` (None if only other code did it), and the number of its `batch` (-1 before
    the first batch). The other attributes depend on the kind:

    `backward`
        `loss`, a `Loss`; `in_step`, whether an optimizer step runs the backward;
        `autocast`, whether it runs under autocast; `finite`, whether the loss is
        finite; `reached`, how many optimizers got gradients; `added`, how much the norm
        of these gradients grew; `divided`, whether the step of a scaler used them.
    `grad`
        A call of `torch.autograd.grad`: its `loss`.
    `left_out`
        A batch whose loss is not finite, and which has no backward.
    `unscale`
        A scaler unscales gradients.
    `clip`
        torch is about to clip gradients: `of`, the name of the limit; `limit`; `norm`,
        that of the gradients; `factor`, what multiplies them.
    `zero_grad`
        A call of `zero_grad`.
    `step`
        Its call: `optimizer`, the number of the optimizer; `scaled`, whether an enabled
        scaler makes the step, and this `scaler`; `skipped`; `again`, whether an earlier
        step has used the same gradients; `scale`, that of this scaler; `in_backward`,
        whether a backward runs meanwhile; `after_save`, whether Determined's loop has
        saved a checkpoint.
        Its gradients: `norm`, of those that it used; `factor`, what still multiplies
        them; `by_hand`, what the user's code multiplied them by.
        Its weights: `rates`, the learning rate of each group, and `rate`, the first;
        `rounded`, whether the float32 weights have become 16-bit numbers since the
        step before; `lost`, the share of 16-bit weights that it left unchanged.
        The doctor: `disturbed`, whether it made gradients overflow since the last
        update; `overflows`, whether the step would have used such an overflow.
    `read`
        A scaled loss becomes a Python number.
    `stale`
        A forward uses a weight that has changed since autocast cast it.
    `closure`
        The step of a scaler gets a closure.
    `update`
        `after`, the loss scale after it.
    `move`
        A scheduler moves: `schedule`; `place`, whether it got an argument or did not
        change its place.
    `autocast`, `autocast_off`
        The training enters a region: its `dtype`; `grad`, whether gradients are
        enabled; `in_batch`, whether a training batch runs.
    `hide`
        `nan_to_num` of a tensor that needs no gradient.
    `cast`
        The weights of a module are cast to a 16-bit `dtype`.
    `gpu_refuses`
        An `operation` without a 16-bit kernel on CUDA gets 16 bits.
    `save`
        A call of `torch.save`: `optimizer` and `scale`, whether it saves the state of
        an optimizer, and a loss scale; `scalers`, how many scalers' states it saves.
    `load`
        A call of `torch.load`: `scalers`, how many scalers' states it returns.
    `restore`
        An optimizer or, if `scaler` is true, a scaler loads a state.
    """


@dataclass(eq=False)
class Scaler:
    """What is known of one `GradScaler`."""

    where: Where | None  # the line that made the scaler
    enabled: bool
    ours: bool  # whether this library made it
    used: bool = False  # whether it scaled a loss
    # Its scale when the trial was "saved" and when it was "resumed"; 0 if disabled.
    states: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Schedule:
    """What is known of one scheduler."""

    kind: str  # the name of its class
    where: Where | None  # the line that made the scheduler
    optimizer: int  # the number of its optimizer
    ours: bool = False  # whether this library made its newest move
    # Its `last_epoch` when the trial was "saved" and when it was "resumed".
    states: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class StepWindow:
    """What happened to an optimizer's gradients since its last step; its next steps.

    A window begins with the first backward after a step. It ends when a backward
    follows its own steps, usually one, or follows an `update` that left its gradients
    out. Gradients that the user's code sets without a backward begin a window, too.
    """

    optimizer: int  # the number of the optimizer
    place: int = 0  # its number among the optimizer's windows, from 1
    # those that added to its gradients
    backwards: list[Event] = field(default_factory=list)
    # How many of the backwards, from the first, lost their gradients before a step:
    # they were zeroed.
    lost: int = 0
    zeroed: list[Event] = field(default_factory=list)  # what zeroed them
    # Whether its first backward added to gradients that an earlier step had used.
    stale: bool = False
    left_out: bool = False  # `update` came after `unscale_`, without a step
    unscales: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)  # of the optimizer's schedulers
    forced: bool = False  # whether the doctor made its gradients overflow
    # Whether the user's code wrote values into its gradients that are no multiple of
    # those before.
    rewritten: bool = False
    by_hand: float = 1.0  # what the user's code multiplied the gradients' norm by

    @property
    def used(self) -> list[Event]:
        """The backwards whose gradients were not zeroed before a step."""
        return self.backwards[self.lost :]

    @property
    def is_empty(self) -> bool:
        """Whether all of its gradients were zeroed before a step."""
        return bool(self.lost) and not self.used

    @property
    def skipped(self) -> bool:
        """Whether all of its steps were skipped."""
        return all(step.skipped for step in self.steps)

    @property
    def is_scaled(self) -> bool:
        """Whether a scaler makes one of its steps."""
        return any(step.scaled for step in self.steps)

    @property
    def scales(self) -> set[float]:
        """The loss scales of its backwards, and the scale that the scaler divides by.

        Empty if no loss was scaled.
        """
        steps = [step.scale for step in self.steps[:1] if step.scaled]
        scaled = {each.loss.scale for each in self.used if each.loss.scale}
        return scaled.union(steps if scaled else [])

    @property
    def unscaled_early(self) -> list[Event]:
        """The unscales between the first and the last backward of a scaled loss."""
        scaled = [each.number for each in self.used if each.loss.scale] or [0]
        return [each for each in self.unscales if scaled[0] < each.number < scaled[-1]]

    @property
    def moved(self) -> list[Schedule]:
        """The schedules that an argument-less call moved after its last backward."""
        last = self.used[-1].number if self.used else 0
        return [
            move.schedule
            for move in self.moves
            if move.number > last and not move.place
        ]


@dataclass(frozen=True)
class Cause:
    """Why a loss or its gradients are not finite."""

    text: str
    where: Where | None  # the line of the first operation that is not finite
    advice: str
    is_of_loss: bool = True  # False if only the gradients are not finite


@dataclass
class Record:
    """What one training did."""

    determined: bool = False  # whether it ran in Determined's loop
    lacks_cuda: bool = False  # whether it asks for CUDA, and there is no GPU
    events: list[Event] = field(default_factory=list)
    # of all optimizers, in the order in which they began
    windows: list[StepWindow] = field(default_factory=list)
    scalers: list[Scaler] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    optimizers: int = 0  # how many there are
    # the dtypes of the weights that optimizers stepped
    weight_dtypes: set[str] = field(default_factory=set)
    batches: int = 0  # training batches that began
    epochs: int = 0  # epochs that ended
    # How many forwards ran with and without autocast, of modules that have trainable
    # weights of their own.
    forwards: Counter[bool] = field(default_factory=Counter)
    # Validation metrics of the same weights, in the trial's precision and in float32.
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    # the weights and buffers that are not finite at the end
    not_finite: list[str] = field(default_factory=list)
    # The modules of weights that an optimizer holds and no gradient reaches, one for
    # each weight. Modules that never ran are left out.
    cut_off: list[str] = field(default_factory=list)
    # of a forward without gradients that overflows only in 16 bits
    validation_cause: Cause | None = None
    cause: Cause | None = None  # of a loss or gradients that are not finite
    hidden_overflow: Cause | None = None  # of an overflow whose loss is finite
    # A cast to 16 bits that changed whole numbers: the largest, and the line.
    rounded_whole_number: tuple[str, Where | None] | None = None
    error: str = ""  # the error that ended it: its type and its text
    raised: Where | None = None  # the line that raised it
    error_after_overflow: bool = False  # whether it came after a forced overflow
    without_overflows: bool = False  # whether it ran without forced overflows
    saved: bool = False  # whether Determined's loop saved a checkpoint
    # A `ScaleComparison` of two loss scales; None if it was not asked for.
    at_two_scales: Any = None

    def note(self, kind: str, **known: Any) -> Event:
        """Add an event at the user's line that is being executed."""
        place = {
            "number": len(self.events),
            "where": users_line(),
            "batch": self.batches - 1,
        }
        event = Event(kind=kind, **place, **known)
        self.events.append(event)
        return event

    def of(self, kind: str, **known: Any) -> list[Event]:
        """The events of a kind whose attributes have these values."""
        its = [event for event in self.events if event.kind == kind]
        wanted = known.items()
        return [event for event in its if wanted <= vars(event).items()]

    @property
    def regions(self) -> list[Event]:
        """Autocast regions that were entered with gradients enabled."""
        return self.of("autocast", grad=True)

    @property
    def regions_of_validation(self) -> list[Event]:
        """Autocast regions that were entered in a validation."""
        return self.of("autocast", grad=False, in_batch=False)

    @property
    def scales_the_loss(self) -> bool:
        """Whether a loss was scaled."""
        return any(scaler.enabled and scaler.used for scaler in self.scalers)

    @property
    def is_amp(self) -> bool:
        """Whether it used autocast or scaled a loss."""
        return bool(self.regions) or self.scales_the_loss

    @property
    def steps_of_each(self) -> list[int]:
        """The number of steps of each optimizer that has stepped."""
        return [*Counter(step.optimizer for step in self.of("step")).values()]

    @property
    def first_line_of_error(self) -> str:
        """The first line of the error that ended the training."""
        return self.error.partition("\n")[0]

    @property
    def stepped_windows(self) -> list[StepWindow]:
        """The windows that have a step."""
        return [window for window in self.windows if window.steps]

    @property
    def unforced_windows(self) -> list[StepWindow]:
        """The windows that have a step, and no forced overflow."""
        return [window for window in self.stepped_windows if not window.forced]


# Find the line of the user's code that runs.


def is_doctors(file: str) -> bool:
    """Whether a file is in this package, or is `runpy`, which runs scripts for it.

    Tracebacks leave such files out.
    """
    return file.startswith(_DOCTOR) or file == _RUNS_SCRIPTS


def users_line() -> Where | None:
    """The user's line that is being executed; None if only other code runs."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.endswith(_LOOP):
            return None
        if is_users(file):
            return where_in(file, line)
    return None


def caller() -> FrameType:
    """The frame that called the function which the doctor has replaced."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next(frame for frame in frames if not _is_passed(frame.f_code.co_filename))


def _is_passed(file: str) -> bool:
    """Whether `caller` passes over a file: the doctor's, or torch's for autocast."""
    return is_doctors(file) or file.endswith(_AUTOCAST)


def called_by_library() -> bool:
    """Whether this library's code outside of `check` made that call."""
    return caller().f_code.co_filename.startswith(_LIBRARY)


def where_in(path: str, line: int) -> Where:
    """A line of a file; the path is relative for a file in the working directory."""
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return Where(inside, line)


def where_raised(error: BaseException) -> Where | None:
    """The innermost line of the user's code in an error's traceback."""
    where = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            where = where_in(frame.f_code.co_filename, line)
    return where
