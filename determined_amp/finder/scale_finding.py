"""Decides which initial loss scale to use, or why no scale helps."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.searching import largest_working
from determined_amp.amp.slots import Slots
from determined_amp.finder.prediction import (
    Prediction,
    any_overflow_at,
    cause_of,
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

# log2 of the largest power of two in float32, the dtype of a loss scale.
LARGEST_LOG2 = 127

# How many bits below the predicted top are tried. A kernel that accumulates in float16
# can overflow a few bits before its result does.
_LOWER = 24


class Verdict(enum.Enum):
    """What to change in the YAML."""

    DEFAULT = "default is fine"
    SCALE = "use 2^k"
    BF16 = "use amp_bf16"
    FORWARD_OVERFLOW = "no scale helps"


@dataclass(frozen=True)
class AtScale:
    """What float16 does to the 16-bit gradients at one loss scale."""

    scale_log2: int
    # predicted share of the nonzero values that overflow, by count
    overflow_share: float
    flushed_share: float  # predicted, see `Prediction.flushed_share`
    # Whether a gradient was not finite in float16, so that `GradScaler` skips the
    # step; None where that was not tried.
    overflow: bool | None


@dataclass(frozen=True)
class ScaleFinding:
    """The safe loss scales of a trial, and the one to start with."""

    # log2 of the smallest power of two at which no tensor loses more than
    # `FLUSHED_LIMIT`.
    low_log2: int
    # log2 of the largest power of two at which nothing overflows, measured in float16.
    # It is below `low_log2` if no scale is safe.
    top_log2: int
    # log2 of the loss scale to start with. If the verdict is `BF16`, this scale still
    # loses least. None if no scale helps.
    choice_log2: int | None
    verdict: Verdict  # what to do
    # from below the range to above it, with 2^16 and all that were tried
    scales: tuple[AtScale, ...]
    # Modules whose gradients are all 0, for instance before an output that starts at 0.
    hidden_modules: tuple[str, ...] = ()
    cause: str = ""  # why no scale helps

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


def find_range(rehearsals: Sequence[Rehearsal], slots: Slots) -> ScaleFinding:
    """Find the loss scale to start with, see `choice_of`.

    The top is measured in float16, beginning at the prediction. The two differ if
    overflowing values are masked on their way to the parameters, or if a kernel
    overflows inside.

    Args:
        rehearsals: The rehearsals of this slot's batches.
        slots: The processes of the training. All of them must call this.

    Raises:
        LossScaleError: if there is nothing to scale.
    """
    prediction = predict_float16(rehearsals, slots)
    tried: dict[int, bool] = {}

    def fails(scale_log2: int) -> bool:
        tried[scale_log2] = any_overflow_at(rehearsals, slots, scale_log2)
        return tried[scale_log2]

    guess = min(prediction.first_overflow_log2 - 1, LARGEST_LOG2)
    least = guess - _LOWER
    top = largest_working(fails, guess, least, LARGEST_LOG2)
    gave_up = top < least
    low = prediction.smallest_scale_log2(FLUSHED_LIMIT)
    return ScaleFinding(
        low_log2=low,
        top_log2=top,
        choice_log2=None if gave_up else choice_of(low, top),
        verdict=_verdict(low, top, gave_up=gave_up),
        scales=tuple(_at_scales(prediction, tried, {low, top, DEFAULT_LOG2})),
        hidden_modules=prediction.hidden_modules,
        cause=cause_of(rehearsals, slots) if gave_up else "",
    )


def _at_scales(
    prediction: Prediction, tried: Mapping[int, bool], others: set[int]
) -> Iterator[AtScale]:
    marks = others.union(tried)
    scales = range(min(marks) - _MARGIN, max(marks) + _MARGIN + 1)
    step = math.ceil(len(scales) / _MOST_ROWS)
    for scale in sorted(marks.union(scales[::step])):
        overflow_share = prediction.total.overflow_share(scale)
        flushed_share = prediction.flushed_share(scale)
        yield AtScale(scale, overflow_share, flushed_share, tried.get(scale))


def _verdict(low: int, top: int, *, gave_up: bool) -> Verdict:
    if gave_up:
        return Verdict.FORWARD_OVERFLOW
    if low > top:
        return Verdict.BF16
    return Verdict.DEFAULT if low <= DEFAULT_LOG2 <= top else Verdict.SCALE
