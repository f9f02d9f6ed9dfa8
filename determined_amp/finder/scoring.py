"""Scores a loss scale without training, as the metric of a search; see `Score`.

Overflow is measured in float16. What float16 flushes is what a cast of the bfloat16
gradients flushes. The score is exact, because nothing is trained and all trials use the
same batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.searching import largest_working
from determined_amp.amp.slots import Slots
from determined_amp.finder.prediction import (
    LossScaleError,
    cause_of,
    overflows,
    predict_float16,
)
from determined_amp.finder.scale_score import Score, score_of, steps_lost

# The smallest normal float32. A smaller loss scale has fewer bits, and soon is 0.
_LEAST_SCALE = 2.0**-126


class NoScaleError(LossScaleError):
    """Every loss scale overflows. The message says why."""


class _Descent:
    """The loss scales after so many skipped steps in a row, in log2."""

    def __init__(
        self, first_log2: float, bits_per_skip: float, min_scale: float
    ) -> None:
        self._first_log2 = first_log2
        self._bits_per_skip = bits_per_skip
        floor_log2 = math.log2(max(min_scale, _LEAST_SCALE))
        self.least_log2 = min(floor_log2, first_log2)
        self.most_skips = self.skips_to(self.least_log2)

    def after(self, skips: int) -> float:
        """log2 of the scale after so many skipped steps."""
        return max(self._first_log2 - skips * self._bits_per_skip, self.least_log2)

    def skips_to(self, scale_log2: float) -> int:
        """The skipped steps until the scale is no larger than this one."""
        return math.ceil((self._first_log2 - scale_log2) / self._bits_per_skip)


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
        rehearsals: Those of the batches of this slot.
        slots: The processes of the training. All of them must call this.
        scale_log2: log2 of the initial loss scale.
        growth_interval: Applied steps in a row before the scale grows.
        backoff_factor: Multiplies the scale after a skipped step.
        min_scale: The lower limit of the scale.

    Raises:
        NoScaleError: if no loss scale helps.
        LossScaleError: if there is no gradient to scale.
    """
    prediction = predict_float16(rehearsals, slots)
    descent = _Descent(scale_log2, -math.log2(backoff_factor), min_scale)
    skipped = _skips(rehearsals, slots, descent, prediction.headroom_log2)
    if skipped > descent.most_skips:
        cause = cause_of(rehearsals, slots, descent.least_log2 if min_scale else 0.0)
        raise NoScaleError(f"no loss scale helps: {cause}")
    flushed_share = prediction.flushed_share(descent.after(skipped))
    lost = steps_lost(skipped, flushed_share, growth_interval)
    return Score(
        init_scale_log2=scale_log2,
        loss_scale_score=score_of(lost),
        steps_lost=lost,
        backward_headroom_bits=prediction.headroom_log2 - scale_log2,
        flushed_share=flushed_share,
        overflow=float(skipped > 0),
    )


def _skips(
    rehearsals: Sequence[Rehearsal],
    slots: Slots,
    descent: _Descent,
    headroom_log2: float,
) -> int:
    """The steps that a training skips until nothing overflows, beginning at the
    predicted number.

    They are one more than `most_skips` if the smallest scale overflows, too.
    """

    def fails(minus_skips: int) -> bool:
        return overflows(rehearsals, slots, descent.after(-minus_skips))

    predicted = descent.skips_to(headroom_log2)
    return -largest_working(fails, -predicted, -descent.most_skips, 0)
