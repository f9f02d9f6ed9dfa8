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
from statistics import mean, median, stdev, variance
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from determined_amp.amp.metrics import MetricName
from determined_amp.experiment.amp_settings import Precision
from determined_amp.runs.run import Machine, Run, Spread

# AMP does not speed up a loop that spends a larger share of its time waiting for data.
WAITS_FOR_DATA = 0.2

# A smaller ratio of speed or memory counts as no difference.
MIN_EFFECT = 1.05

_CONFIDENCE = 0.95
_MOST_SEEDS = 1000


class Equivalence(enum.Enum):
    """The verdict on a difference."""

    EQUAL = "equal within the margin"
    DIFFERENT = "different"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Interval:
    """A mean difference and its 95 % confidence interval.

    Args:
        mean: The mean difference.
        seeds: Number of pairs if paired, else the smaller of the two numbers of seeds.
        std: Standard deviation of the difference for one seed; None with a single seed.
        half_width: Half width of the interval; None with a single seed.
        paired: Whether the differences are between runs with the same seed.
    """

    mean: float
    seeds: int
    std: float | None
    half_width: float | None
    paired: bool

    @property
    def low(self) -> float:
        return self.mean - (math.inf if self.half_width is None else self.half_width)

    @property
    def high(self) -> float:
        return self.mean + (math.inf if self.half_width is None else self.half_width)

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
        wanted = max(margin - abs(self.mean), abs(self.mean))
        for seeds in range(2, _MOST_SEEDS + 1):
            dof = seeds - 1 if self.paired else 2 * (seeds - 1)
            quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, dof))
            if quantile * self.std / math.sqrt(seeds) <= wanted:
                return seeds
        return None


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The interval of paired differences: both sequences have the same seeds in the same order."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    std = stdev(differences) if len(differences) > 1 else None
    half_width = _half_width(stats.ttest_rel, ours, theirs) if std else std
    return Interval(mean(differences), len(differences), std, half_width, paired=True)


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The interval of the difference of two means, by Welch's t-test for unequal variances."""
    difference, seeds = mean(ours) - mean(theirs), min(len(ours), len(theirs))
    std = math.sqrt(variance(ours) + variance(theirs)) if seeds > 1 else None
    half_width = _half_width(stats.ttest_ind, ours, theirs, equal_var=False) if std else std
    return Interval(difference, seeds, std, half_width, paired=False)


def _half_width(test: Callable[..., Any], *groups: Sequence[float], **options: bool) -> float:
    with warnings.catch_warnings():
        # SciPy warns that its p-value is imprecise if seeds hardly differ; the p-value is not used.
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = test(*groups, **options).confidence_interval(_CONFIDENCE)
    return float(high - low) / 2


@dataclass(frozen=True)
class Summary:
    """The runs of one precision.

    Args:
        precision: The precision.
        runs: The finished runs, by seed.
        failed: The failed runs.
        metric: The compared validation metric.
    """

    precision: Precision
    runs: tuple[Run, ...]
    failed: tuple[Run, ...]
    metric: str

    @property
    def name(self) -> str:
        return self.precision.value

    @property
    def machine(self) -> Machine:
        """The machine, the same for all compared runs."""
        return (*self.runs, *self.failed)[0].machine

    @property
    def is_only_fp32(self) -> bool:
        """Whether the precision is `tf32` on a device without TF32."""
        return (*self.runs, *self.failed)[0].is_only_fp32

    @property
    def seeds(self) -> tuple[int, ...]:
        """The known seeds of the finished runs."""
        return tuple(run.seed for run in self.runs if run.seed is not None)

    def values(self, metric: str | None = None) -> list[float]:
        """The metric at the last validation, of every finished run that has it."""
        return self._known(lambda run: run.metrics.get(metric or self.metric))

    @property
    def mean(self) -> float | None:
        values = self.values()
        return mean(values) if values else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the metric over seeds; None with fewer than two values."""
        values = self.values()
        return stdev(values) if len(values) > 1 else None

    @property
    def speed(self) -> Spread | None:
        """Samples per second: the spread of the runs' medians."""
        return self.spread(lambda run: run.speed.median if run.speed else None)

    @property
    def memory(self) -> Spread | None:
        """Peak memory in MiB: allocated by torch on a GPU, resident on a CPU."""
        return self.spread(lambda run: run.last(MetricName.PEAK_MEMORY_MIB))

    @property
    def reserved_memory(self) -> Spread | None:
        """Peak of the GPU memory that torch reserved, in MiB."""
        return self.spread(lambda run: run.last(MetricName.PEAK_RESERVED_MEMORY_MIB))

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time that the loop waited for data: the median over the runs."""
        shares = self.spread(lambda run: run.reports.data_wait_share)
        return shares.median if shares else None

    @property
    def waits_for_data(self) -> bool:
        return (self.data_wait_share or 0.0) > WAITS_FOR_DATA

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread over the finished runs that have the value."""
        return Spread.of(self._known(value))

    def _known(self, value: Callable[[Run], float | None]) -> list[float]:
        values = (value(run) for run in self.runs)
        return [found for found in values if found is not None]


def summaries(runs: Sequence[Run], metric: str) -> list[Summary]:
    """A summary for each precision with a finished or failed run, in the order of `Precision`."""

    def having(precision: Precision, *, failed: bool) -> tuple[Run, ...]:
        found = [r for r in runs if r.precision is precision and r.state.is_failure is failed]
        return tuple(sorted(found, key=lambda run: (run.seed or 0, run.name)))

    made = [Summary(p, having(p, failed=False), having(p, failed=True), metric) for p in Precision]
    return [summary for summary in made if summary.runs or summary.failed]


@dataclass(frozen=True)
class Ratio:
    """The ratio of one precision to another over pairs of runs.

    Args:
        median: Median over the pairs.
        low: Minimum over the pairs; for a single pair the smallest ratio of its reports.
        high: Maximum over the pairs; for a single pair the largest ratio of its reports.
        pairs: Number of pairs.
        by_seed: Whether runs with the same seed are paired; otherwise each run of one precision is
            paired with each run of the other.
    """

    median: float
    low: float
    high: float
    pairs: int
    by_seed: bool

    @property
    def is_larger(self) -> bool:
        """Whether the ratio is above 1 in every pair, and its median at least `MIN_EFFECT`."""
        return self.low > 1.0 and self.median >= MIN_EFFECT

    @property
    def is_smaller(self) -> bool:
        return self.high < 1.0 and self.median <= 1.0 / MIN_EFFECT


@dataclass(frozen=True)
class Comparison:
    """One precision compared with another.

    Args:
        ours: The precision to judge.
        base: The precision to compare with.
        metric: The validation metric.
        smaller_is_better: Direction of the metric.
        margin: Difference of the metric that does not matter.
        speed: Ratio of samples per second; None if not measured.
        memory: Ratio of allocated memory; None if not measured, as on a CPU.
        difference: Difference of the metric, ours minus base.
    """

    ours: Summary
    base: Summary
    metric: str
    smaller_is_better: bool
    margin: float
    speed: Ratio | None
    memory: Ratio | None
    difference: Interval

    @property
    def verdict(self) -> Equivalence:
        """The verdict on the metric."""
        return self.difference.verdict(self.margin)

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


def compare(ours: Summary, base: Summary, *, smaller_is_better: bool, margin: float) -> Comparison:
    """Compare two precisions; both must have finished runs."""
    on_gpu = ours.machine.on_gpu
    return Comparison(
        ours=ours,
        base=base,
        metric=ours.metric,
        smaller_is_better=smaller_is_better,
        margin=margin,
        speed=speed_ratio(ours, base),
        memory=_ratio(ours, base, _allocated) if on_gpu else None,
        difference=difference(ours, base, ours.metric),
    )


def comparisons(
    found: Sequence[Summary], base: Precision, *, smaller_is_better: bool, margin: float
) -> list[Comparison]:
    """Compare every precision with the baseline, and AMP also with `tf32` on devices with TF32.

    Many programs run in TF32 on such devices if they do not use AMP.
    """
    finished = {s.precision: s for s in found if s.runs}
    real = {p: s for p, s in finished.items() if not s.is_only_fp32}
    pairs = [(s, finished[base]) for p, s in real.items() if p is not base]
    if base is Precision.FP32 and Precision.TF32 in real:
        pairs += [(s, real[Precision.TF32]) for p, s in real.items() if p.autocast_dtype]
    return [
        compare(ours, theirs, smaller_is_better=smaller_is_better, margin=margin)
        for ours, theirs in pairs
    ]


def speed_ratio(ours: Summary, base: Summary) -> Ratio | None:
    """The ratio of samples per second; None if not measured."""
    return _ratio(ours, base, lambda run: run.speed)


def difference(ours: Summary, base: Summary, metric: str) -> Interval:
    """The difference of a metric that all finished runs have.

    It is paired by seed if both precisions have two or more seeds in common.
    """
    pairs = _by_seed(ours, base)
    if len(pairs) > 1 or (pairs and min(len(ours.runs), len(base.runs)) < 2):
        return paired(
            *zip(*((a.metrics[metric], b.metrics[metric]) for a, b in pairs), strict=True)
        )
    return welch(ours.values(metric), base.values(metric))


def _by_seed(ours: Summary, base: Summary) -> list[tuple[Run, Run]]:
    theirs = {run.seed: run for run in base.runs if run.seed is not None}
    return [(run, theirs[run.seed]) for run in ours.runs if run.seed in theirs]


def _ratio(ours: Summary, base: Summary, value: Callable[[Run], Spread | None]) -> Ratio | None:
    by_seed = _by_seed(ours, base)
    pairs = [
        (a, b)
        for run, other in by_seed or product(ours.runs, base.runs)
        if (a := value(run)) and (b := value(other))
    ]
    if not pairs:
        return None
    ratios = [a.median / b.median for a, b in pairs]
    low, high = min(ratios), max(ratios)
    if len(pairs) == 1:
        ((a, b),) = pairs
        low, high = a.low / b.high, a.high / b.low
    return Ratio(median(ratios), low, high, len(pairs), bool(by_seed))


def _allocated(run: Run) -> Spread | None:
    # The last report has the largest peak: after the reset that follows the first batches, peaks
    # only grow.
    peak = run.last(MetricName.PEAK_MEMORY_MIB)
    return Spread.of([peak] if peak else [])
