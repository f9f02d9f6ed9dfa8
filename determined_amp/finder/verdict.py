"""Decides which initial loss scale to use, or why no scale helps."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from determined_amp.amp.origin import OUTSIDE, WHOLE_MODEL
from determined_amp.finder.frozen import FrozenBatch
from determined_amp.finder.passes import Observation, Place, Prediction, cause_of, observe, predict

# log2 of the default init_scale of PyTorch's GradScaler.
DEFAULT_LOG2 = 16

# Twice float16's rounding error. If every tensor loses less, the parameters' gradients are about as
# close to float32 as they can be. If tensors lose 1 %, the gradients are off by a few percent.
FLUSHED_LIMIT = 0.001

# How many powers of two a table shows on each side of the window, and in total.
_MARGIN = 4
_MOST_ROWS = 24

# Predictions cover at least this range of log2 scales, which a search may have tried.
_SEARCHED = (-16, 48)

# A loss scale is a float32.
LARGEST_LOG2 = 127

# How many times the top is halved at most. A kernel that accumulates in float16 can overflow a few
# bits before its result does.
_MOST_DECREMENTS = 24

# Bits between the choice and the top, where the window has them. While learning begins, the largest
# gradient can grow by 2 to 5 bits (`benchmarks.loss_scale`), and later batches differ from the
# first ones by another.
_ROOM = 6


class Verdict(enum.Enum):
    """What to change in the YAML."""

    DEFAULT = "default is fine"
    SCALE = "use 2^k"
    BF16 = "use amp_bf16"
    FORWARD_OVERFLOW = "no scale helps"


@dataclass(frozen=True)
class Window:
    """The safe loss scales, and the one to start with."""

    # log2 of the smallest power of two at which no tensor loses more than `FLUSHED_LIMIT`, see
    # `Prediction.flushed_share`.
    low_log2: int
    # log2 of the largest power of two at which nothing overflows, verified in float16. It is below
    # `low_log2` if no scale is safe.
    top_log2: int
    # log2 of the loss scale to start with. If the verdict is not to use a scale, it is the scale
    # that loses least; None if no scale helps.
    choice_log2: int | None

    def __contains__(self, scale_log2: float) -> bool:
        return self.low_log2 <= scale_log2 <= self.top_log2

    @property
    def window_bits(self) -> int:
        """Bits from the lowest safe scale to the highest; negative if no scale is safe."""
        return self.top_log2 - self.low_log2

    def expected_skips(self, init_scale_log2: float) -> int:
        """Number of steps that a run skips from this initial scale; each skip halves the scale."""
        return max(0, math.ceil(init_scale_log2 - self.top_log2))


@dataclass(frozen=True)
class Shares:
    """The shares of the 16-bit gradients that float16 is predicted to lose at one loss scale."""

    scale_log2: int
    overflow_share: float  # share of the nonzero values that overflow, by count
    flushed_share: float  # largest share of any tensor's norm that is flushed to 0


@dataclass(frozen=True)
class ModuleGradients:
    """The 16-bit gradients of one module without a loss scale."""

    name: str
    in_model: bool  # whether the model has a module of that name
    zeros: int  # number of values that are 0
    values_by_log2: Mapping[int, int]  # number of values in [2^q, 2^(q+1)), by q
    # log2 of the smallest power of two at which a value overflows; None if all are 0.
    first_overflow_log2: int | None
    low_log2: int | None  # `Finding.low_log2` of this module alone; None if all are 0

    @property
    def largest_log2(self) -> int | None:
        """Floor of log2 of the largest value; None if all are 0."""
        return max(self.values_by_log2, default=None)


@dataclass(frozen=True)
class Finding(Window):
    """The answer for one trial; `determined_amp.finder.advice` writes and reads it as JSON."""

    verdict: Verdict  # what to do
    predicted: tuple[Shares, ...]  # predictions for consecutive powers of two, ascending
    # Measurements in float16; the one at `choice_log2` is the last.
    verified: tuple[Observation, ...]
    modules: tuple[ModuleGradients, ...]  # gradients by module, in the order of the backward
    headroom_log2: float  # `Prediction.headroom_log2`
    recorded_log2: int | None = None  # `Prediction.recorded_log2`
    reason: str = ""  # why the prediction was not recorded in bfloat16
    cause: str = ""  # why no scale helps

    @property
    def answer_log2(self) -> int | None:
        """`choice_log2` if the verdict is to use it, otherwise None."""
        return self.choice_log2 if self.verdict in (Verdict.DEFAULT, Verdict.SCALE) else None

    @property
    def hidden_modules(self) -> tuple[str, ...]:
        """Modules whose gradients are all 0, for instance before an output that starts at 0."""
        return tuple(module.name for module in self.modules if not module.values_by_log2)

    @property
    def first_overflow_log2(self) -> int:
        """log2 of the smallest power of two at which a value is predicted to overflow."""
        return min(m.first_overflow_log2 for m in self.modules if m.first_overflow_log2 is not None)

    def at(self, scale_log2: float) -> Shares:
        """The prediction for a scale, rounded down to a power of two."""
        index = math.floor(scale_log2) - self.predicted[0].scale_log2
        return self.predicted[min(max(index, 0), len(self.predicted) - 1)]

    def shown_scales(self) -> list[int]:
        """log2 of scales from below the window to above it, including 2^16."""
        measured = (int(seen.scale_log2) for seen in self.verified)
        return _shown_scales(self.low_log2, self.top_log2, measured)


def choice_of(low: int, top: int) -> int:
    """log2 of the scale to start with, given a safe window from 2^`low` to 2^`top`.

    It leaves 6 bits to the top, because gradients grow while learning begins, and each bit too few
    is a skipped step. It never leaves more than to the bottom, because gradients may shrink, too,
    and a bit there costs thousands of steps until the scale has grown. Inside the window, nothing
    else depends on the scale, so PyTorch's default is chosen where it leaves as much.
    """
    room = min(_ROOM, (top - low + 1) // 2) if low <= top else 1
    return DEFAULT_LOG2 if low <= DEFAULT_LOG2 <= top - room else top - room


def find(context: Place, batches: Sequence[FrozenBatch]) -> Finding:
    """Find the loss scale to start with, see `choice_of`, and verify it in float16.

    Raises:
        LossScaleError: if there is nothing to scale.
    """
    prediction = predict(context, batches)

    def measure(scale_log2: int) -> Observation:
        return observe(context, batches, scale_log2, prediction)

    predicted_top, above = _top(measure, prediction)
    verified = _verified(measure, predicted_top, above)
    top, gave_up = int(verified[-1].scale_log2), verified[-1].overflow
    low = prediction.smallest_scale_log2(FLUSHED_LIMIT)
    choice = choice_of(low, top)
    if choice != top and not gave_up:
        verified.append(measure(choice))
    cause = cause_of(context, batches) if gave_up else ""
    known = {seen.scale_log2 for seen in verified}
    verified = [*(seen for seen in above if seen.scale_log2 not in known), *verified]
    rows = _shown_scales(low, top, (int(seen.scale_log2) for seen in verified))
    scales = range(min(rows[0], _SEARCHED[0]), max(rows[-1], _SEARCHED[1]) + 1)
    overflow, flushed = prediction.total.overflow_share, prediction.flushed_share
    return Finding(
        low_log2=low,
        top_log2=top,
        choice_log2=None if gave_up else choice,
        verdict=_verdict(low, top, gave_up=gave_up),
        predicted=tuple(Shares(scale, overflow(scale), flushed(scale)) for scale in scales),
        verified=tuple(verified),
        modules=tuple(_module(prediction, name) for name in prediction.modules),
        headroom_log2=prediction.headroom_log2,
        recorded_log2=prediction.recorded_log2,
        reason=prediction.reason,
        cause=cause,
    )


def _top(
    measure: Callable[[int], Observation], prediction: Prediction
) -> tuple[int, list[Observation]]:
    """log2 of the largest power of two at which nothing overflows, measured from the prediction up.

    Values that are masked on their way to the parameters may overflow: the gradients of zeroed
    padding before a normalisation are large, but dropped. The prediction cannot know that.

    Returns:
        The log2, and the measurements.
    """
    works, first, step = prediction.first_overflow_log2 - 1, prediction.first_overflow_log2, 1
    seen: list[Observation] = []

    def overflows(scale_log2: int) -> bool:
        seen.append(measure(scale_log2))
        return seen[-1].overflow

    while first <= LARGEST_LOG2 and not overflows(first):
        works, first, step = first, first + step, 2 * step
    first = min(first, LARGEST_LOG2 + 1)
    while seen and first - works > 1:
        middle = (works + first) // 2
        works, first = (works, middle) if overflows(middle) else (middle, first)
    return min(works, LARGEST_LOG2), seen


def _verified(
    measure: Callable[[int], Observation], top: int, above: Sequence[Observation]
) -> list[Observation]:
    """Measurements at the predicted top, and at the scales below it until nothing overflows.

    The last one still overflows if no scale helps.
    """
    measured = next((seen for seen in above if seen.scale_log2 == top), None)
    verified = [measured or measure(top)]
    # At a large scale the loss itself may overflow in float16. At a scale of 1 it must not.
    hopeless = verified[0].overflow and not measure(0).loss_is_finite
    while verified[-1].overflow and not hopeless and len(verified) <= _MOST_DECREMENTS:
        top -= 1
        verified.append(measure(top))
    return verified


def _module(prediction: Prediction, name: str) -> ModuleGradients:
    histogram, alone = prediction.modules[name], _alone(prediction, name)
    return ModuleGradients(
        name=name,
        in_model=name not in (OUTSIDE, WHOLE_MODEL),
        zeros=histogram.zeros,
        values_by_log2=histogram.by_power(),
        first_overflow_log2=alone.first_overflow_log2 if histogram.nonzero else None,
        low_log2=alone.smallest_scale_log2(FLUSHED_LIMIT) if histogram.nonzero else None,
    )


def _shown_scales(low: int, top: int, measured: Iterable[int]) -> list[int]:
    first = min(low, top, DEFAULT_LOG2) - _MARGIN
    last = max(low, top, DEFAULT_LOG2) + _MARGIN
    step = math.ceil((last - first + 1) / _MOST_ROWS)
    return sorted({DEFAULT_LOG2, low, top, *measured, *range(first, last + 1, step)})


def _verdict(low: int, top: int, *, gave_up: bool) -> Verdict:
    if gave_up:
        return Verdict.FORWARD_OVERFLOW
    if low > top:
        return Verdict.BF16
    return Verdict.DEFAULT if low <= DEFAULT_LOG2 <= top else Verdict.SCALE


def _alone(prediction: Prediction, module: str) -> Prediction:
    return prediction.of(lambda name: name == module)
