"""Compares one precision with another: speed, memory, and the metric with its confidence interval.

A difference that is not significant does not prove equality. Two precisions are equal within a
margin if the whole 95 % confidence interval of their difference lies inside the margin.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, median_high, median_low, stdev, variance
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import Precision
from determined_amp.runs.run import ACCURACY, Run, Spread

# AMP does not speed up a loop that spends a larger share of its time waiting for data.
WAITS_FOR_DATA = 0.2

# A smaller ratio of speed or memory counts as no difference.
MIN_EFFECT = 1.05

_CONFIDENCE = 0.95
_MOST_SEEDS = 1000

# A sentence names at most this many seeds.
_NAMED_SEEDS = 10


class Judgement(enum.Enum):
    """The judgement of a claim."""

    HOLDS = "yes"
    FAILS = "no"
    UNKNOWN = "cannot be told"
    UNMEASURED = "not measured"


# By text: what is measured, and the range in which the claim holds. Speed and memory are ratios,
# the accuracy is a difference of shares.
CLAIMS = {
    "2.0x the speed": ("speed", 2.0, math.inf),
    "half the memory": ("memory", 0.0, 0.5),
    "within 0.3 points of accuracy": ("accuracy", -0.003, 0.003),
}

Range = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """One claim and its judgement."""

    text: str  # the claim
    judgement: Judgement  # whether it holds
    measured: Range | None  # the range of the measurement; None if it was not measured


def judge(measured: Range | None, low: float, high: float) -> Judgement:
    """Whether a measured range lies inside the range of a claim, outside of it, or across."""
    if measured is None:
        return Judgement.UNMEASURED
    if low <= measured[0] and measured[1] <= high:
        return Judgement.HOLDS
    outside = measured[1] < low or measured[0] > high
    return Judgement.FAILS if outside else Judgement.UNKNOWN


class Equivalence(enum.Enum):
    """The verdict on a difference."""

    EQUAL = "equal within the margin"
    DIFFERENT = "different"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Interval:
    """A mean difference and its 95 % confidence interval."""

    mean: float
    seeds: int  # number of pairs if paired, else the smaller of the two numbers of seeds
    std: float | None  # standard deviation of the difference for one seed; None with a single seed
    low: float  # lower end of the interval; -inf with a single seed
    high: float  # upper end of the interval; inf with a single seed
    paired: bool  # whether the differences are between runs with the same seed

    @property
    def half_width(self) -> float | None:
        """Half width of the interval; None with a single seed."""
        return (self.high - self.low) / 2 if math.isfinite(self.high) else None

    @property
    def known_range(self) -> tuple[float, float]:
        """The interval; without any spread over seeds it could be anything."""
        return (self.low, self.high) if self.std else (-math.inf, math.inf)

    def verdict(self, margin: float) -> Equivalence:
        """Judge the difference; a significant difference within the margin counts as equal.

        Without any spread over seeds the verdict is unknown: a metric over few validation samples
        can have the same difference for all seeds by chance.
        """
        if not self.std:
            return Equivalence.UNKNOWN
        if -margin <= self.low and self.high <= margin:
            return Equivalence.EQUAL
        if self.low > 0 or self.high < 0:
            return Equivalence.DIFFERENT
        return Equivalence.UNKNOWN

    def seeds_needed(self, margin: float) -> int | None:
        """Number of seeds for a verdict, if mean and standard deviation stay the same.

        None without a standard deviation, or if more than a thousand seeds are needed.
        """
        if not self.std:
            return None
        # The largest half width that allows one of the two verdicts.
        half_width = max(margin - abs(self.mean), abs(self.mean))
        for seeds in range(2, _MOST_SEEDS + 1):
            dof = seeds - 1 if self.paired else 2 * (seeds - 1)
            quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, dof))
            if quantile * self.std / math.sqrt(seeds) <= half_width:
                return seeds
        return None


def paired(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The interval of paired differences: both sequences have the same seeds in the same order."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    std = stdev(differences) if len(differences) > 1 else None
    ends = _ends(mean(differences), std, lambda: stats.ttest_rel(first, second))
    return Interval(mean(differences), len(differences), std, *ends, paired=True)


def welch(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The interval of the difference of two means, by Welch's t-test for unequal variances."""
    difference, seeds = mean(first) - mean(second), min(len(first), len(second))
    std = math.sqrt(variance(first) + variance(second)) if seeds > 1 else None
    ends = _ends(difference, std, lambda: stats.ttest_ind(first, second, equal_var=False))
    return Interval(difference, seeds, std, *ends, paired=False)


def _ends(middle: float, std: float | None, test: Callable[[], Any]) -> Range:
    """The ends of the interval of a test: anything with one seed, a point without a spread."""
    if std is None:
        return -math.inf, math.inf
    if std == 0.0:
        return middle, middle
    with warnings.catch_warnings():
        # SciPy warns that its p-value is imprecise if seeds hardly differ; the p-value is not used.
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = test().confidence_interval(_CONFIDENCE)
    return float(low), float(high)


@dataclass(frozen=True)
class Summary:
    """The runs of one precision."""

    precision: Precision
    runs: Sequence[Run]  # the completed runs, by seed
    failed: Sequence[Run]  # the failed runs
    metric: str  # the compared metric

    @property
    def name(self) -> str:
        return self.precision.value

    @property
    def is_only_fp32(self) -> bool:
        """Whether the precision is `tf32` on a device without TF32."""
        return (*self.runs, *self.failed)[0].is_only_fp32

    @property
    def seeds(self) -> list[int]:
        """The known seeds of the completed runs."""
        return [run.seed for run in self.runs if run.seed is not None]

    @property
    def seeds_in_words(self) -> str:
        """The number of runs, and their seeds."""
        count = len(self.runs)
        known = ", ".join(map(str, self.seeds[:_NAMED_SEEDS])) or "unknown"
        known += ", ..." if len(self.seeds) > _NAMED_SEEDS else ""
        plural = "s" * (count != 1)
        failed = f" and {len(self.failed)} failed" if self.failed else ""
        return f"{count} run{plural}{failed}" + (f", seed{plural} {known}" if count else "")

    @property
    def values(self) -> list[float]:
        """The compared metric at the end of each completed run."""
        return [run.metrics[self.metric] for run in self.runs]

    @property
    def mean(self) -> float | None:
        """Mean of the compared metric; None without a completed run."""
        return mean(self.values) if self.runs else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the compared metric; None with fewer than two completed runs."""
        return stdev(self.values) if len(self.runs) > 1 else None

    @property
    def speed(self) -> Spread | None:
        """Samples per second: the spread of the runs' medians."""
        return self.spread(median_speed)

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time that the loop waited for data: the median over the runs."""
        waits = self.spread(lambda run: run.reports.data_wait_share)
        return waits.median if waits else None

    def last(self, name: str) -> Spread | None:
        """The spread of a number of the last training report."""
        return self.spread(lambda run: run.last(name))

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread over the completed runs that have the value."""
        return Spread.of([number for run in self.runs if (number := value(run)) is not None])


def median_speed(run: Run) -> float | None:
    """Samples per second of a run; None if not measured."""
    return run.speed.median if run.speed else None


def summaries(runs: Sequence[Run], metric: str) -> list[Summary]:
    """A summary for each precision that has a run, in the order of `Precision`."""
    by_precision = []
    for precision in Precision:
        same = [run for run in runs if run.precision is precision]
        same.sort(key=lambda run: (run.seed or 0, run.name))
        failed = [run for run in same if run.state.is_failure]
        completed = [run for run in same if not run.state.is_failure]
        if same:
            by_precision.append(Summary(precision, completed, failed, metric))
    return by_precision


@dataclass(frozen=True)
class Ratio:
    """The ratio of one precision to another over pairs of runs."""

    median: float  # median over the pairs
    low: float  # minimum over the pairs; for a single pair the smallest ratio of its reports
    high: float  # maximum over the pairs; for a single pair the largest ratio of its reports
    pairs: int
    # Whether runs with the same seed are paired; otherwise each run of one precision is paired with
    # each run of the other.
    by_seed: bool
    # Whether the 95 % interval of its mean excludes 1, in the logarithm. On a busy machine two
    # pairs may agree by chance. True if nothing is known of a spread over runs.
    beyond_chance: bool = True

    @property
    def is_larger(self) -> bool:
        """Whether it is above 1 beyond chance, in every pair, and its median `MIN_EFFECT`."""
        return self.beyond_chance and self.low > 1.0 and self.median >= MIN_EFFECT

    @property
    def is_smaller(self) -> bool:
        return self.beyond_chance and self.high < 1.0 and self.median <= 1.0 / MIN_EFFECT


@dataclass(frozen=True)
class Comparison:
    """One precision compared with another."""

    precision: Precision  # the precision to judge
    against: Precision  # the precision to compare with
    smaller_is_better: bool  # direction of the metric
    margin: float  # difference of the metric that does not matter
    speed: Ratio | None  # ratio of samples per second; None if not measured
    memory: Ratio | None  # ratio of allocated memory; None if not measured, as on a CPU
    difference: Interval  # difference of the metric, candidate minus base
    verdict: Equivalence
    lost_runs: int  # number of failed runs of the precision to judge
    # The claims of the literature, judged; empty if they were not asked for.
    claims: Sequence[Claim] = ()

    @property
    def is_better(self) -> bool:
        """Whether the mean of the metric is better, whatever the verdict."""
        return (self.difference.mean < 0) is self.smaller_is_better

    @property
    def is_not_worse(self) -> bool:
        """Whether the metric is equal or better.

        If the verdict is unknown, its mean decides: better, or worse by at most the margin.
        """
        if self.verdict is Equivalence.UNKNOWN:
            return self.is_better or abs(self.difference.mean) <= self.margin
        return self.verdict is Equivalence.EQUAL or self.is_better


def comparisons(
    compared: Sequence[Summary],
    base: Precision,
    *,
    smaller_is_better: bool,
    margin: float,
    judge_claims: bool,
) -> list[Comparison]:
    """Compare every precision with the baseline, and AMP also with `tf32` on devices with TF32.

    A run of the baseline must have completed. The other options are those of `find`.
    """
    made = []
    for candidate, other in _to_compare(compared, base):
        speed = speed_ratio(candidate, other)
        memory = _ratio(candidate, other, _allocated) if candidate.runs[0].machine.on_gpu else None
        measured = difference(candidate, other, candidate.metric)
        comparison = Comparison(
            precision=candidate.precision,
            against=other.precision,
            smaller_is_better=smaller_is_better,
            margin=margin,
            speed=speed,
            memory=memory,
            difference=measured,
            verdict=measured.verdict(margin),
            lost_runs=len(candidate.failed),
            claims=_claims(candidate, other, speed, memory) if judge_claims else (),
        )
        made.append(comparison)
    return made


def _to_compare(compared: Sequence[Summary], base: Precision) -> list[tuple[Summary, Summary]]:
    completed = {s.precision: s for s in compared if s.runs}
    real = {p: s for p, s in completed.items() if not s.is_only_fp32}
    pairs = [(s, completed[base]) for p, s in real.items() if p is not base]
    # Where the device has TF32, many programs without AMP run in it.
    if base is Precision.FP32 and Precision.TF32 in real:
        pairs += [(s, real[Precision.TF32]) for p, s in real.items() if p.autocasts]
    return pairs


def _claims(
    candidate: Summary, base: Summary, speed: Ratio | None, memory: Ratio | None
) -> Sequence[Claim]:
    """The claims of the literature on AMP, judged; none for another precision."""
    if not candidate.precision.autocasts:
        return ()
    accuracies = [run.metrics.get(ACCURACY) for run in (*candidate.runs, *base.runs)]
    # An accuracy above 1 is in percent, and the claim is on a share.
    has_accuracy = all(value is not None and value <= 1.0 for value in accuracies)
    measured = {
        "speed": (speed.low, speed.high) if speed else None,
        "memory": (memory.low, memory.high) if memory else None,
        "accuracy": difference(candidate, base, ACCURACY).known_range if has_accuracy else None,
    }
    return [
        Claim(text, judge(measured[what], low, high), measured[what])
        for text, (what, low, high) in CLAIMS.items()
    ]


def speed_ratio(candidate: Summary, base: Summary) -> Ratio | None:
    """The ratio of samples per second; None if not measured."""
    return _ratio(candidate, base, lambda run: run.speed)


def difference(candidate: Summary, base: Summary, metric: str) -> Interval:
    """The difference of a metric that all completed runs have."""
    by_seed = _by_seed(candidate, base)
    if by_seed:
        values = ((run.metrics[metric], other.metrics[metric]) for run, other in by_seed)
        return paired(*zip(*values, strict=True))
    return welch(*([run.metrics[metric] for run in side.runs] for side in (candidate, base)))


def _by_seed(candidate: Summary, base: Summary) -> list[tuple[Run, Run]]:
    """The pairs of equal seed; none if most runs would be left out for a single pair."""
    others = {run.seed: run for run in base.runs if run.seed is not None}
    pairs = [(run, others[run.seed]) for run in candidate.runs if run.seed in others]
    is_enough = len(pairs) > 1 or min(len(candidate.runs), len(base.runs)) == 1
    return pairs if is_enough else []


def _ratio(
    candidate: Summary, base: Summary, value: Callable[[Run], Spread | None]
) -> Ratio | None:
    """The ratio of a number over the pairs of equal seed, or over all pairs of runs."""
    by_seed = _by_seed(candidate, base)
    pairs = [
        (a, b)
        for run, other in by_seed or product(candidate.runs, base.runs)
        if (a := value(run)) and (b := value(other))
    ]
    if not pairs:
        return None
    ratios = [a.median / b.median for a, b in pairs]
    low, high = min(ratios), max(ratios)
    if len(pairs) == 1:
        ((a, b),) = pairs
        low, high = a.low / b.high, a.high / b.low
    # A median that inverts if the ratios do: of an even number the geometric mean.
    middle = math.sqrt(median_low(ratios) * median_high(ratios))
    if by_seed:
        logs = [(math.log(a.median), math.log(b.median)) for a, b in pairs]
        change = paired(*zip(*logs, strict=True))
    else:
        sides = ([value(run) for run in side.runs] for side in (candidate, base))
        change = welch(*([math.log(it.median) for it in side if it] for side in sides))
    chance = bool(change.std) and change.low <= 0.0 <= change.high
    return Ratio(middle, low, high, len(pairs), bool(by_seed), not chance)


def _allocated(run: Run) -> Spread | None:
    # The last report has the largest peak: after the reset that follows the first batches, peaks
    # only grow.
    peak = run.last(MetricName.PEAK_MEMORY_MIB) or 0.0
    return Spread.of([peak] if peak > 0 else [])
