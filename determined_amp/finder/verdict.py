"""What the passes mean: which initial loss scale to use, or why none will do."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from determined_amp.finder.frozen import FrozenBatch
from determined_amp.finder.passes import (
    Observation,
    Place,
    Prediction,
    cause_of,
    observe,
    predict,
)
from determined_amp.finder.recorder import OUTSIDE, WHOLE_MODEL

# What PyTorch's GradScaler starts with.
DEFAULT_LOG2 = 16

# Twice what float16 rounds at any scale. Where no tensor is flushed by more, parameters' gradients
# are as close to those of float32 as at any scale, or nearly; at 1 % they are some percent off.
FLUSHED_LIMIT = 0.001

# Rows of a table around the window, in bits.
_MARGIN = 4
_MOST_ROWS = 24

# What a search may have been over, in log2.
_SEARCHED = (-16, 48)

# More islands than these, and the model is hardly float16 any more.
_MOST_ISLANDS = 3

# A kernel that adds up in float16 can overflow some bits before its result would.
_MOST_DECREMENTS = 24


class Verdict(enum.Enum):
    """What to write into the YAML."""

    DEFAULT = "default is fine"
    SCALE = "use 2^k"
    BF16 = "use amp_bf16"
    ISLANDS = "keep these modules in float32"
    FORWARD_OVERFLOW = "no scale helps"


@dataclass(frozen=True)
class Window:
    """The safe loss scales, and the one to start with.

    Args:
        low_log2: The smallest power of two at which no tensor is flushed by more than
            `FLUSHED_LIMIT`, see `Prediction.flushed_share`.
        top_log2: The largest at which nothing overflows; where float16 overflowed below the
            prediction, the one that was verified. Below `low_log2` if no scale is safe.
        choice_log2: log2 of the loss scale to start with; the best of a bad lot where the verdict
            is not for a scale, None where no scale helps.
    """

    low_log2: int
    top_log2: int
    choice_log2: int | None

    def __contains__(self, scale_log2: float) -> bool:
        return self.low_log2 <= scale_log2 <= self.top_log2

    @property
    def window_bits(self) -> int:
        """Powers of two from the lowest safe scale to the highest; negative if there is none."""
        return self.top_log2 - self.low_log2

    def expected_skips(self, init_scale_log2: float) -> int:
        """Optimizer steps that a run starting at that scale skips: each lowers it by one bit."""
        return max(0, math.ceil(init_scale_log2 - self.top_log2))


@dataclass(frozen=True)
class Shares:
    """What float16 would lose of the 16-bit gradients at one loss scale, predicted.

    Args:
        scale_log2: The loss scale is 2 to that power.
        overflow_share: Of the values that are not 0, by number.
        flushed_share: Of the norm of the gradient that suffers most.
    """

    scale_log2: int
    overflow_share: float
    flushed_share: float


@dataclass(frozen=True)
class ModuleGradients:
    """The 16-bit gradients of one module without a loss scale.

    Args:
        name: Of the module.
        in_model: Whether the model has a module of that name.
        zeros: Number of values that are 0.
        values_by_log2: Number of values in [2^q, 2^(q+1)), by q.
        first_overflow_log2: The smallest power of two that makes one infinite; None if all are 0.
        low_log2: As `Finding.low_log2`, of this module alone; None if all are 0.
    """

    name: str
    in_model: bool
    zeros: int
    values_by_log2: Mapping[int, int]
    first_overflow_log2: int | None
    low_log2: int | None

    @property
    def largest_log2(self) -> int | None:
        """The floor of log2 of the largest value; None if all are 0."""
        return max(self.values_by_log2, default=None)


@dataclass(frozen=True)
class Finding(Window):
    """The answer for one trial; `determined_amp.finder.advice` writes and reads it as JSON.

    Args:
        verdict: What to do.
        predicted: By scale, ascending: every power of two that is shown or searched.
        verified: Real float16 passes, the one at `choice_log2` last.
        modules: In the order of the backward.
        headroom_log2: log2 of the largest factor, not only powers of two, that the gradients bear.
        recorded_log2: As in `Prediction`.
        reason: Why it was not recorded in bfloat16.
        islands: Modules to keep in float32.
        cause: Why no scale helps.
    """

    verdict: Verdict
    predicted: tuple[Shares, ...]
    verified: tuple[Observation, ...]
    modules: tuple[ModuleGradients, ...]
    headroom_log2: float
    recorded_log2: int | None = None
    reason: str = ""
    islands: tuple[str, ...] = ()
    cause: str = ""

    @property
    def hidden_modules(self) -> tuple[str, ...]:
        """Modules all of whose gradients are 0, as behind an output layer that starts at 0."""
        return tuple(module.name for module in self.modules if not module.values_by_log2)

    @property
    def first_overflow_log2(self) -> int:
        """The smallest power of two at which a value was predicted to become infinite."""
        return min(m.first_overflow_log2 for m in self.modules if m.first_overflow_log2 is not None)

    def at(self, scale_log2: float) -> Shares:
        """The prediction for a scale, or for the next power of two below it."""
        index = math.floor(scale_log2) - self.predicted[0].scale_log2
        return self.predicted[min(max(index, 0), len(self.predicted) - 1)]

    def shown_scales(self) -> list[int]:
        """Powers of two from below the window to above it, with 2^16 among them."""
        measured = (int(seen.scale_log2) for seen in self.verified)
        return _shown_scales(self.low_log2, self.top_log2, measured)


def find(context: Place, batches: Sequence[FrozenBatch], *, sweep: bool = False) -> Finding:
    """Look for the loss scale to start with: one bit below the largest that nothing overflows at.

    One bit, because a largest gradient over a few batches is not the largest of the first steps. A
    second bit would save a skipped step at most, and would come off the other side, where it can
    cost thousands of steps of growth.

    Args:
        context: Where the batches are passed.
        batches: Training batches.
        sweep: Measure every scale that is shown in float16, too.

    Raises:
        LossScaleError: if there is nothing to scale.
    """
    prediction = predict(context, batches)
    top = prediction.first_overflow_log2 - 1
    low = prediction.smallest_scale_log2(FLUSHED_LIMIT)
    choice = top if low == top else top - 1
    verified = [observe(context, batches, choice, prediction)]
    # The loss itself may overflow in float16 at a large scale; without one it must not.
    hopeless = verified[0].overflow and not observe(context, batches, 0, prediction).loss_is_finite
    while verified[-1].overflow and not hopeless and len(verified) <= _MOST_DECREMENTS:
        choice -= 1
        top = choice  # what really is the largest
        verified.append(observe(context, batches, choice, prediction))
    gave_up = verified[-1].overflow
    (verdict, islands), cause = _judge(prediction, low, top), ""
    if gave_up:
        verdict, islands, cause = Verdict.FORWARD_OVERFLOW, (), cause_of(context, batches)
    if sweep:
        done = [int(seen.scale_log2) for seen in verified]
        more = sorted({*_shown_scales(low, top, done)} - {*done})
        verified = [*(observe(context, batches, at, prediction) for at in more), *verified]
    shown = _shown_scales(low, top, (int(seen.scale_log2) for seen in verified))
    scales = range(min(shown[0], _SEARCHED[0]), max(shown[-1], _SEARCHED[1]) + 1)
    overflow, flushed = prediction.total.overflow_share, prediction.flushed_share
    return Finding(
        low_log2=low,
        top_log2=top,
        choice_log2=None if gave_up else choice,
        verdict=verdict,
        predicted=tuple(Shares(scale, overflow(scale), flushed(scale)) for scale in scales),
        verified=tuple(verified),
        modules=tuple(_module(prediction, name) for name in prediction.modules),
        headroom_log2=prediction.headroom_log2,
        recorded_log2=prediction.recorded_log2,
        reason=prediction.reason,
        islands=islands,
        cause=cause,
    )


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


def _judge(prediction: Prediction, low: int, top: int) -> tuple[Verdict, tuple[str, ...]]:
    if low > top:
        islands = _islands(prediction)
        return (Verdict.ISLANDS if islands else Verdict.BF16), islands
    if low <= DEFAULT_LOG2 <= top:
        return Verdict.DEFAULT, ()
    return Verdict.SCALE, ()


def _islands(prediction: Prediction) -> tuple[str, ...]:
    """The fewest modules without which the others fit, from one end or from the other."""
    modules = {name: h for name, h in prediction.modules.items() if h.nonzero}
    loudest = sorted(modules, key=lambda name: -(modules[name].largest_log2 or 0))
    lowest = {name: _alone(prediction, name).smallest_scale_log2(FLUSHED_LIMIT) for name in modules}
    faintest = sorted(modules, key=lambda name: -lowest[name])
    orders = (loudest, faintest)
    found = [islands for order in orders if (islands := _leading(prediction, order))]
    return min(found, key=len, default=())


def _alone(prediction: Prediction, module: str) -> Prediction:
    return prediction.of(lambda name: name == module)


def _leading(prediction: Prediction, order: Sequence[str]) -> tuple[str, ...]:
    for count in range(1, min(_MOST_ISLANDS, (len(order) - 1) // 2) + 1):
        islands = order[:count]
        if OUTSIDE in islands or WHOLE_MODEL in islands:
            return ()
        rest = prediction.of(lambda name, islands=islands: name not in islands)  # type: ignore[misc]
        if rest.smallest_scale_log2(FLUSHED_LIMIT) < rest.first_overflow_log2:
            return tuple(islands)
    return ()
