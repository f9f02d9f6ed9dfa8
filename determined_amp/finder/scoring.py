"""Scores a loss scale without training, as the metric of a search; see `Score`.

Overflow is measured in float16. The flushed share is computed from the bfloat16
gradients. The score has no noise, because nothing is trained and all trials use the
same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.searching import largest_working
from determined_amp.amp.settings import scale_text
from determined_amp.amp.slots import Slots
from determined_amp.finder.prediction import (
    LossScaleError,
    any_overflow_at,
    cause_of,
    predict_float16,
)
from determined_amp.finder.scale_score import Score

# The smallest normal float32. A smaller loss scale has fewer bits, and soon is 0.
_LEAST_SCALE = 2.0**-126


_OVERFLOWS = "every loss scale down to {} overflows: {}"


class NoScaleError(LossScaleError):
    """Every loss scale that the settings allow overflows. The message says why."""


def score_batches(
    rehearsals: Sequence[Rehearsal],
    slots: Slots,
    scale_log2: float,
    *,
    growth_interval: int = 2000,
    backoff_factor: float = 0.5,
    min_scale: float = 0.0,
) -> Score:
    """Score the loss scale 2^`scale_log2`; the score is the same on every slot.

    Args:
        rehearsals: The rehearsals of this slot's batches.
        slots: The processes of the training. All of them must call this.
        scale_log2: log2 of the initial loss scale.
        growth_interval: Applied steps in a row before the scale grows.
        backoff_factor: Multiplies the scale after a skipped step.
        min_scale: The lower limit of the scale.

    Raises:
        LossScaleError: if there is no gradient to scale, or every scale overflows, down
            to the lower limit (`NoScaleError`).
    """
    prediction = predict_float16(rehearsals, slots)
    bits_per_skip = -math.log2(backoff_factor)
    least_log2 = min(math.log2(max(min_scale, _LEAST_SCALE)), scale_log2)

    def after(skips: int) -> float:
        return max(scale_log2 - skips * bits_per_skip, least_log2)

    def fails(minus_skips: int) -> bool:
        return any_overflow_at(rehearsals, slots, after(-minus_skips))

    # From the predicted number of skips on; `most_skips + 1` if every scale fails.
    most_skips = math.ceil((scale_log2 - least_log2) / bits_per_skip)
    predicted = math.ceil((scale_log2 - prediction.headroom_log2) / bits_per_skip)
    skipped = -largest_working(fails, -predicted, -most_skips, 0)
    if skipped > most_skips:
        cause = cause_of(rehearsals, slots, least_log2 if min_scale else 0.0)
        raise NoScaleError(_OVERFLOWS.format(scale_text(2.0**least_log2), cause))
    flushed = prediction.flushed_share(after(skipped))
    headroom_bits = prediction.headroom_log2 - scale_log2
    return Score.of(scale_log2, skipped, flushed, headroom_bits, growth_interval)
