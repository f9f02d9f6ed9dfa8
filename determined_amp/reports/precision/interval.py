"""What some seeds say about a difference: Student's t, and an equivalence test.

That a difference is not significant does not make two things equal. Equal within a margin they are
if the whole 95 % confidence interval of the difference lies inside it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev, variance

_CONFIDENCE = 0.95
_MOST_SEEDS = 1000


class Verdict(enum.Enum):
    """What can be said of a difference."""

    EQUAL = "equal within the margin"
    DIFFERENT = "different"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Interval:
    """A mean difference and its 95 % confidence interval.

    Args:
        mean: The difference.
        seeds: How many there are of each of the two; of pairs, if paired.
        deviation: Standard deviation of the difference that one seed gives; None of one seed.
        half_width: Of the interval; None if there is no saying.
        paired: Whether differences are those of equal seeds.
    """

    mean: float
    seeds: int
    deviation: float | None
    half_width: float | None
    paired: bool

    @property
    def low(self) -> float:
        return self.mean - (math.inf if self.half_width is None else self.half_width)

    @property
    def high(self) -> float:
        return self.mean + (math.inf if self.half_width is None else self.half_width)

    def verdict(self, margin: float) -> Verdict:
        """Equal comes first: a difference that is real and smaller than the margin is none.

        Seeds that all differ by the same say nothing of how far others do: a metric of few
        validation samples has few values.
        """
        if not self.deviation:
            return Verdict.UNKNOWN
        if -margin <= self.low and self.high <= margin:
            return Verdict.EQUAL
        if self.low > 0 or self.high < 0:
            return Verdict.DIFFERENT
        return Verdict.UNKNOWN

    def seeds_to_tell(self, margin: float) -> int | None:
        """How many it would take for a verdict, if mean and deviation stay as they are.

        None if there is no deviation yet, or if it would take more than a thousand.
        """
        if not self.deviation:
            return None
        # Wide enough for one of the two verdicts.
        wanted = max(margin - abs(self.mean), abs(self.mean))
        for seeds in range(2, _MOST_SEEDS + 1):
            freedom = seeds - 1 if self.paired else 2 * (seeds - 1)
            if student_t(freedom) * self.deviation / math.sqrt(seeds) <= wanted:
                return seeds
        return None


def paired(differences: Sequence[float]) -> Interval:
    """Of the differences between runs of equal seed."""
    seeds, middle = len(differences), mean(differences)
    if seeds < 2:
        return Interval(middle, seeds, None, None, paired=True)
    deviation = stdev(differences)
    half_width = student_t(seeds - 1) * deviation / math.sqrt(seeds)
    return Interval(middle, seeds, deviation, half_width, paired=True)


def unpaired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Of the difference between two groups of other seeds, of other variance: Welch's."""
    middle, seeds = mean(ours) - mean(theirs), min(len(ours), len(theirs))
    if seeds < 2:
        return Interval(middle, seeds, None, None, paired=False)
    parts = [variance(group) / len(group) for group in (ours, theirs)]
    error = math.sqrt(sum(parts))
    weights = sum(p**2 / (len(g) - 1) for p, g in zip(parts, (ours, theirs), strict=True))
    freedom = sum(parts) ** 2 / weights if weights else 1.0
    deviation = math.sqrt(variance(ours) + variance(theirs))
    return Interval(middle, seeds, deviation, student_t(freedom) * error, paired=False)


def student_t(freedom: float) -> float:
    """The quantile that 95 % of Student's t are within, on both sides of 0."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # noqa: PLC0415 - it is slow

    return float(stdtrit(freedom, (1 + _CONFIDENCE) / 2))
