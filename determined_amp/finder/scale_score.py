"""The score of a loss scale, and what the scores of a search mean; needs no torch.

The validation loss after a short training cannot rank loss scales, because seeds change
it more than scales inside the safe range do. So the score counts the optimizer steps
that a scale loses:

    steps_lost       = skipped steps + lost share of the gradient * growth_interval
    loss_scale_score = log2(1 + steps_lost)

A skipped step lowers the scale, so the first steps are skipped until nothing overflows.
The lost share is what float16 flushes to 0 at the scale after these skips. It counts if
it is above `FLUSHED_LIMIT`, for the steps until the scale grows. So the score is 0
throughout the safe range, and rises on both sides of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# log2 of the default init_scale of PyTorch's GradScaler.
DEFAULT_LOG2 = 16

# Bits between the choice and the top, if the range is wide enough. While learning
# begins, the largest gradient can grow by 2 to 5 bits (`benchmarks.loss_scale`), and
# later batches differ from the first ones by another bit.
_ROOM = 6

# Twice float16's rounding error. If every tensor loses less, the parameters' gradients
# are about as close to float32 as they can be. If tensors lose 1 %, the gradients are
# off by a few percent.
FLUSHED_LIMIT = 0.001


@dataclass(frozen=True)
class Score:
    """The metrics of one loss scale; every value is finite."""

    init_scale_log2: float
    loss_scale_score: float  # log2(1 + `steps_lost`); smaller is better, and 0 is best
    # Steps skipped until nothing overflows, plus `flushed_share` times the scaler's
    # `growth_interval` if that share is above `FLUSHED_LIMIT`.
    steps_lost: float
    # log2(65520 / largest 16-bit gradient at this scale), as predicted from bfloat16.
    backward_headroom_bits: float
    # 2-norm of the 16-bit gradients that float16 flushes to 0, divided by the 2-norm of
    # all, in the tensor that loses most, at the scale after the skipped steps.
    flushed_share: float
    overflow: float  # 1 if a step with this scale is skipped, otherwise 0

    @classmethod
    def of(
        cls,
        init_scale_log2: float,
        skipped: int,
        flushed_share: float,
        headroom_bits: float,
        growth_interval: int,
    ) -> Score:
        """The score of a scale at which the first `skipped` steps overflow."""
        lost = float(skipped)
        if flushed_share > FLUSHED_LIMIT:
            lost += flushed_share * growth_interval
        score, overflow = math.log2(1.0 + lost), float(skipped > 0)
        return cls(init_scale_log2, score, lost, headroom_bits, flushed_share, overflow)


def bits_from_default(scale_log2: float) -> float:
    """How far a scale is from PyTorch's default, in bits; ranks trials of equal scores.

    Infinite for NaN, an unknown scale.
    """
    return math.inf if math.isnan(scale_log2) else abs(scale_log2 - DEFAULT_LOG2)


def choice_of(low: int, top: int) -> int:
    """log2 of the scale to start with, given a safe range from 2^`low` to 2^`top`.

    The choice is 6 bits below the top, because gradients grow while learning begins,
    and each missing bit costs a skipped step. In a narrower range it is in the middle:
    gradients may shrink, too, and a missing bit there costs thousands of steps until
    the scale has grown. Nothing else depends on the scale inside the range, so
    PyTorch's default is chosen if it leaves as much room above.
    """
    room = min(_ROOM, (top - low + 1) // 2) if low <= top else 1
    return DEFAULT_LOG2 if low <= DEFAULT_LOG2 <= top - room else top - room


@dataclass(frozen=True)
class ScaleAdvice:
    """What the scores of a search say."""

    text: str
    scale_log2: float | None  # the scale to set; None where the default is fine


def advice_of(
    metric: str | None, trials: Sequence[tuple[float, float | None]]
) -> ScaleAdvice | None:
    """The advice from a search's scored trials, by the rule of the finder.

    Args:
        metric: The metric that ranks the trials.
        trials: log2 of the loss scale of each trial, and how many steps it lost.

    Returns:
        None with fewer than two trials, with another metric than the score, or if the
        loss scale or the lost steps of a trial are unknown.
    """
    if metric != "loss_scale_score" or len(trials) < 2:
        return None
    known = [
        (scale, lost)
        for scale, lost in trials
        if lost is not None and math.isfinite(scale)
    ]
    if len(known) < len(trials):
        return None
    free = [scale for scale, lost in known if lost == 0]
    if not free:
        best, fewest = min(known, key=lambda trial: trial[1])
        text = f"every scale of this search loses steps, and the best one {fewest:.4g}"
        return ScaleAdvice(text, best)
    low, top = min(free), max(free)
    found = (
        f"no step is lost in {len(free)} of {len(trials)} trials, at 2^{low:g} to "
        f"2^{top:g}"
    )
    if low <= DEFAULT_LOG2 <= top:
        fine = f"default is fine: 2^{DEFAULT_LOG2} is among them"
        return ScaleAdvice(f"{found}: {fine}; a search can find nothing better", None)
    choice = min(max(choice_of(math.ceil(low), math.floor(top)), low), top)
    lowest = min(scale for scale, _ in known)
    untried = "; no lower scale was tried" if low == lowest else ""
    return ScaleAdvice(f"{found}: use 2^{choice:g}{untried}", choice)
