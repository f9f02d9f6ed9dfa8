"""What the passes mean: which initial loss scale to use, or why none will do."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
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
class Finding:
    """The answer for one trial.

    Args:
        verdict: What to do.
        prediction: The gradients, seen in bfloat16.
        choice_log2: log2 of the loss scale to start with; the best of a bad lot where the verdict
            is not for a scale, None where no scale helps.
        low_log2: The smallest power of two at which no tensor is flushed by more than
            `FLUSHED_LIMIT`, see `Prediction.flushed_share`.
        top_log2: The largest at which nothing overflows; where float16 overflowed below the
            prediction, the one that was verified.
        verified: Real float16 passes, the one at `choice_log2` last.
        islands: Modules to keep in float32.
        cause: Why no scale helps.
    """

    verdict: Verdict
    prediction: Prediction
    choice_log2: int | None
    low_log2: int
    top_log2: int
    verified: tuple[Observation, ...]
    islands: tuple[str, ...] = ()
    cause: str = ""

    @property
    def window_bits(self) -> int:
        """Powers of two from the lowest safe scale to the highest; negative if there is none."""
        return self.top_log2 - self.low_log2

    def expected_skips(self, init_scale_log2: float) -> int:
        """Optimizer steps that a run starting at that scale skips: each lowers it by one bit."""
        return max(0, math.ceil(init_scale_log2 - self.top_log2))

    @property
    def hidden_modules(self) -> tuple[str, ...]:
        """Modules all of whose gradients are 0, as behind an output layer that starts at 0."""
        return tuple(name for name, h in self.prediction.modules.items() if not h.nonzero)


def find(context: Place, batches: Sequence[FrozenBatch]) -> Finding:
    """Look for the loss scale to start with: one bit below the largest that nothing overflows at.

    One bit, because a largest gradient over a few batches is not the largest of the first steps. A
    second bit would save a skipped step at most, and would come off the other side, where it can
    cost thousands of steps of growth.

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
    while verified[-1].overflow:
        if hopeless or len(verified) > _MOST_DECREMENTS:
            return Finding(
                Verdict.FORWARD_OVERFLOW,
                prediction,
                None,
                low,
                top,
                tuple(verified),
                cause=cause_of(context, batches),
            )
        choice -= 1
        top = choice  # what really is the largest
        verified.append(observe(context, batches, choice, prediction))
    verdict, islands = _judge(prediction, low, top)
    return Finding(verdict, prediction, choice, low, top, tuple(verified), islands)


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
