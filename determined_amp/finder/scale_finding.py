"""Decides which initial loss scale to use, or why no scale helps."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.searching import largest_working
from determined_amp.amp.slots import Slots
from determined_amp.finder.histogram import OVERFLOW_LOG2
from determined_amp.finder.prediction import (
    Prediction,
    cause_of,
    overflows,
    predict_float16,
)
from determined_amp.finder.scale_score import (
    DEFAULT_LOG2,
    FLUSHED_LIMIT,
    choice_of,
)

# How many powers of two a table shows on each side of the range, and in total.
_MARGIN = 4
_MOST_ROWS = 24

# Predictions cover at least this range of log2 scales, which a search may have tried.
_SEARCHED = (-16, 48)

# A loss scale is a float32.
LARGEST_LOG2 = 127

# How far below the predicted top a scale is tried. A kernel that accumulates in float16
# can overflow a few bits before its result does.
_LOWER = 24


class Verdict(enum.Enum):
    """What to change in the YAML."""

    DEFAULT = "default is fine"
    SCALE = "use 2^k"
    BF16 = "use amp_bf16"
    FORWARD_OVERFLOW = "no scale helps"


@dataclass(frozen=True)
class Shares:
    """The shares of the 16-bit gradients that float16 is predicted to lose at one loss
    scale.
    """

    scale_log2: int
    overflow_share: float  # share of the nonzero values that overflow, by count
    flushed_share: float  # `Prediction.flushed_share`


@dataclass(frozen=True)
class Measured:
    """A loss scale that was tried in float16."""

    scale_log2: int
    overflow: bool  # whether a gradient was not finite: `GradScaler` skips such a step


@dataclass(frozen=True)
class ModuleGradients:
    """The 16-bit gradients of one module without a loss scale; they are not all 0."""

    name: str
    largest_log2: int  # floor of log2 of the largest value
    low_log2: int  # `ScaleFinding.low_log2` of this module alone

    @property
    def first_overflow_log2(self) -> int:
        """log2 of the smallest power of two at which a value overflows."""
        return OVERFLOW_LOG2 - self.largest_log2


@dataclass(frozen=True)
class ScaleFinding:
    """The safe loss scales of a trial, and the one to start with."""

    # log2 of the smallest power of two at which no tensor loses more than
    # `FLUSHED_LIMIT`.
    low_log2: int
    # log2 of the largest power of two at which nothing overflows, measured in float16.
    # It is below `low_log2` if no scale is safe.
    top_log2: int
    # log2 of the loss scale to start with. If the verdict is not to use a scale, it is
    # the scale that loses least; None if no scale helps.
    choice_log2: int | None
    verdict: Verdict  # what to do
    # predictions for consecutive powers of two, ascending
    predicted: tuple[Shares, ...]
    measured: tuple[Measured, ...]  # in the order of the measurements
    # gradients by module, in the order of the backward
    modules: tuple[ModuleGradients, ...]
    # Modules whose gradients are all 0, for instance before an output that starts at 0.
    hidden_modules: tuple[str, ...] = ()
    cause: str = ""  # why no scale helps

    def __contains__(self, scale_log2: float) -> bool:
        return self.low_log2 <= scale_log2 <= self.top_log2

    @property
    def range_bits(self) -> int:
        """Bits from the lowest safe scale to the highest; negative if no scale is
        safe.
        """
        return self.top_log2 - self.low_log2

    @property
    def answer_log2(self) -> int | None:
        """The scale that the verdict recommends; None if it recommends none."""
        if self.verdict is Verdict.DEFAULT:
            return DEFAULT_LOG2
        return self.choice_log2 if self.verdict is Verdict.SCALE else None

    def expected_skips(self, init_scale_log2: float) -> int:
        """Number of steps that a run skips from this initial scale; each skip halves
        the scale.
        """
        return max(0, math.ceil(init_scale_log2 - self.top_log2))

    def at(self, scale_log2: float) -> Shares:
        """The prediction for a scale, rounded down to a power of two."""
        index = math.floor(scale_log2) - self.predicted[0].scale_log2
        return self.predicted[min(max(index, 0), len(self.predicted) - 1)]

    def shown_scales(self) -> list[int]:
        """log2 of scales from below the range to above it, including 2^16."""
        return _shown_scales(self.low_log2, self.top_log2, self.measured)


def find_range(rehearsals: Sequence[Rehearsal], slots: Slots) -> ScaleFinding:
    """Find the loss scale to start with, see `choice_of`.

    The top is measured in float16, beginning where it is predicted: values that are
    masked on their way to the parameters may overflow, and a kernel may overflow
    inside.

    Args:
        rehearsals: Those of the batches of this slot.
        slots: The processes of the training. All of them must call this.

    Raises:
        LossScaleError: if there is nothing to scale.
    """
    prediction = predict_float16(rehearsals, slots)
    measured: list[Measured] = []

    def fails(scale_log2: int) -> bool:
        measured.append(Measured(scale_log2, overflows(rehearsals, slots, scale_log2)))
        return measured[-1].overflow

    guess = min(prediction.first_overflow_log2 - 1, LARGEST_LOG2)
    least = guess - _LOWER
    top = largest_working(fails, guess, least, LARGEST_LOG2)
    gave_up = top < least
    low = prediction.smallest_scale_log2(FLUSHED_LIMIT)
    shown = _shown_scales(low, top, measured)
    seen = {name: its for name, its in prediction.modules.items() if its.total.nonzero}
    return ScaleFinding(
        low_log2=low,
        top_log2=top,
        choice_log2=None if gave_up else choice_of(low, top),
        verdict=_verdict(low, top, gave_up=gave_up),
        predicted=_shares(prediction, shown),
        measured=tuple(measured),
        modules=tuple(_module(name, its) for name, its in seen.items()),
        hidden_modules=tuple(name for name in prediction.modules if name not in seen),
        cause=cause_of(rehearsals, slots) if gave_up else "",
    )


def _shares(prediction: Prediction, shown: Sequence[int]) -> tuple[Shares, ...]:
    first, last = min(shown[0], _SEARCHED[0]), max(shown[-1], _SEARCHED[1])
    return tuple(
        Shares(
            scale,
            prediction.total.overflow_share(scale),
            prediction.flushed_share(scale),
        )
        for scale in range(first, last + 1)
    )


def _module(name: str, prediction: Prediction) -> ModuleGradients:
    low = prediction.smallest_scale_log2(FLUSHED_LIMIT)
    return ModuleGradients(name, prediction.largest_log2, low)


def _shown_scales(low: int, top: int, measured: Iterable[Measured]) -> list[int]:
    marks = {low, top, DEFAULT_LOG2, *(one.scale_log2 for one in measured)}
    scales = range(min(marks) - _MARGIN, max(marks) + _MARGIN + 1)
    step = math.ceil(len(scales) / _MOST_ROWS)
    return sorted({*marks, *scales[::step]})


def _verdict(low: int, top: int, *, gave_up: bool) -> Verdict:
    if gave_up:
        return Verdict.FORWARD_OVERFLOW
    if low > top:
        return Verdict.BF16
    return Verdict.DEFAULT if low <= DEFAULT_LOG2 <= top else Verdict.SCALE
