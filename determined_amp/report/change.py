"""Measures what a precision changes, with an interval, and judges the change.

A change that is not significant does not prove equality: two precisions are equal only
if the whole interval of the change lies inside the margin.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from scipy import stats  # type: ignore[import-untyped]

# Speed and memory are judged by the logarithm of their ratio. A ratio closer to 1 does
# not matter.
MIN_RATIO = 1.05
RATIO_MARGIN = math.log(MIN_RATIO)

_CONFIDENCE = 0.95

# Changes that differ by less, relative to the largest, differ by rounding alone.
_ROUNDING = 1e-9


class Judgement(enum.Enum):
    """The verdict on a change."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "equal"
    UNKNOWN = "cannot tell yet"


@dataclass(frozen=True)
class Change:
    """The change of a number from one precision to another, over pairs of runs."""

    mean: float  # mean over the pairs; a mean of logs if `is_ratio`
    low: float  # lower end of the 95 % interval; NaN if the pairs give no interval
    high: float  # upper end of the interval
    pairs: int
    margin: float  # a smaller change does not matter
    more_is_better: bool
    is_ratio: bool = False  # whether the numbers are logs of ratios

    @property
    def gain(self) -> float:
        """The mean, positive if it is for the better."""
        return self.mean if self.more_is_better else -self.mean

    def shown(self, number: float) -> float:
        """Convert a number of this change for a reader: from a log to a ratio."""
        return math.exp(number) if self.is_ratio else number

    @property
    def ends(self) -> tuple[float, float, float]:
        """The lower end, the mean and the upper end, for a reader."""
        return self.shown(self.low), self.shown(self.mean), self.shown(self.high)

    def __str__(self) -> str:
        """The mean, and its interval."""
        form, unit = (".2f", "x") if self.is_ratio else ("+.2g", "")
        low, middle, high = self.ends
        interval = f"95 % interval {low:{form}} to {high:{form}}"
        told = "no interval yet" if math.isnan(low) else interval
        return f"{middle:{form}}{unit} ({told})"

    @property
    def verdict(self) -> str:
        """The judgement as text to append to the numbers; empty without an interval."""
        return "" if math.isnan(self.low) else f": {self.judgement.value}"

    @property
    def judgement(self) -> Judgement:
        """The verdict.

        A change is better or worse if its interval excludes 0 and its mean reaches the
        margin. Without an interval nothing can be told.
        """
        if -self.margin <= self.low and self.high <= self.margin:
            return Judgement.EQUAL
        excludes_zero = self.low > 0 or self.high < 0
        if not excludes_zero or abs(self.mean) < self.margin:
            return Judgement.UNKNOWN
        return Judgement.BETTER if self.gain > 0 else Judgement.WORSE


def change_of(
    differences: Sequence[float],
    margin: float,
    *,
    more_is_better: bool,
    is_ratio: bool = False,
) -> Change:
    """Compute the change, and its interval by Student's t-test.

    Args:
        differences: One difference per pair of runs, at least one.
        margin: A smaller change does not matter.
        more_is_better: Whether a positive difference is for the better.
        is_ratio: Whether the differences are logs of ratios.
    """
    middle = mean(differences)
    pairs = len(differences)
    low = high = math.nan
    if pairs > 1 and math.isfinite(middle):
        low = high = middle
        spread = max(differences) - min(differences)
        if spread > _ROUNDING * max(map(abs, differences)):
            test = stats.ttest_1samp(differences, 0.0)
            low, high = map(float, test.confidence_interval(_CONFIDENCE))
    return Change(middle, low, high, pairs, margin, more_is_better, is_ratio)
