"""Compares one precision with another: speed, memory, and the metric with its confidence interval.

A difference that is not significant does not prove equality. Two precisions are equal within a
margin if the whole 95 % confidence interval of their difference lies inside the margin.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean, median_high, median_low, stdev, variance
from typing import Any

from scipy import stats  # type: ignore[import-untyped]

from determined_amp.amp.metrics import MetricName
from determined_amp.amp.settings import SCALER_KEYS, Precision
from determined_amp.report.claims import Claim, judge_all
from determined_amp.runs.run import Machine, Run, RunState, Spread
from determined_amp.runs.settings import ACCURACY, AMP

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
        low: Lower end of the interval; -inf with a single seed.
        high: Upper end of the interval; inf with a single seed.
        paired: Whether the differences are between runs with the same seed.
    """

    mean: float
    seeds: int
    std: float | None
    low: float
    high: float
    paired: bool

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
    middle, seeds = mean(differences), len(differences)
    std = stdev(differences) if seeds > 1 else None
    ends = _ends(middle, std, stats.ttest_rel, ours, theirs)
    return Interval(middle, seeds, std, *ends, paired=True)


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The interval of the difference of two means, by Welch's t-test for unequal variances."""
    difference, seeds = mean(ours) - mean(theirs), min(len(ours), len(theirs))
    std = math.sqrt(variance(ours) + variance(theirs)) if seeds > 1 else None
    ends = _ends(difference, std, stats.ttest_ind, ours, theirs, equal_var=False)
    return Interval(difference, seeds, std, *ends, paired=False)


def _ends(
    middle: float,
    std: float | None,
    test: Callable[..., Any],
    *groups: Sequence[float],
    **options: bool,
) -> tuple[float, float]:
    """The ends of the interval: anything with one seed, a point without a spread."""
    if std is None:
        return -math.inf, math.inf
    if std == 0.0:
        return middle, middle
    with warnings.catch_warnings():
        # SciPy warns that its p-value is imprecise if seeds hardly differ; the p-value is not used.
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = test(*groups, **options).confidence_interval(_CONFIDENCE)
    return float(low), float(high)


@dataclass(frozen=True)
class MeasuredRun:
    """One run of a comparison, with the numbers that the report shows.

    Args:
        name: Its folder, or its trial and master.
        precision: Its precision.
        seed: Seed of parameters and data order; None if unknown.
        state: How it ended.
        reason: Why it failed; empty if it completed.
        machine: The machine it ran on.
        date: When it began, ISO 8601; None if unknown.
        scaler: Its scaler settings, by key.
        batches: Number of batches trained.
        metrics: The last validation metrics.
        curve: Batches and value of the compared metric at each validation.
        samples_per_second: Over its steady reports; None if not measured.
        training_seconds: Seconds to train all samples at its median speed.
        peak_memory_mib: Allocated by torch on a GPU, resident on a CPU.
        peak_reserved_memory_mib: GPU memory that torch reserved.
        applied_steps: Number of applied optimizer steps.
        skipped_steps: Number of skipped optimizer steps.
        loss_scale_log2: log2 of the loss scale at the end.
        data_wait_share: Share of the time that the loop waited for data.
        audit_share: Share of the first batch's FLOPs in the precision; None if not audited.
        shares_device: Whether other runs used the device at the same time.
    """

    name: str
    precision: Precision
    seed: int | None
    state: RunState
    reason: str
    machine: Machine
    date: str | None
    scaler: Mapping[str, Any]
    batches: int
    metrics: Mapping[str, float]
    curve: Sequence[tuple[int, float]]
    samples_per_second: Spread | None
    training_seconds: float | None
    peak_memory_mib: float | None
    peak_reserved_memory_mib: float | None
    applied_steps: float | None
    skipped_steps: float | None
    loss_scale_log2: float | None
    data_wait_share: float | None
    audit_share: float | None
    shares_device: bool

    @staticmethod
    def of(run: Run, metric: str) -> MeasuredRun:
        """The numbers of a run; `metric` is the compared one."""
        return MeasuredRun(
            name=run.name,
            precision=run.precision,
            seed=run.seed,
            state=run.state,
            reason=run.reason,
            machine=run.machine,
            date=run.date,
            scaler={key: run.settings.get(f"{AMP}.{key}") for key in SCALER_KEYS},
            batches=run.trained_batches,
            metrics=run.metrics,
            curve=run.curve(metric),
            samples_per_second=run.speed,
            training_seconds=run.training_seconds,
            peak_memory_mib=run.last(MetricName.PEAK_MEMORY_MIB),
            peak_reserved_memory_mib=run.last(MetricName.PEAK_RESERVED_MEMORY_MIB),
            applied_steps=run.last(MetricName.APPLIED_STEPS),
            skipped_steps=run.last(MetricName.SKIPPED_STEPS),
            loss_scale_log2=run.last(MetricName.LOSS_SCALE_LOG2),
            data_wait_share=run.reports.data_wait_share,
            audit_share=run.reports.audit_share,
            shares_device=run.shares_device,
        )

    @property
    def speed(self) -> float | None:
        """Median of its samples per second; None if not measured."""
        return self.samples_per_second.median if self.samples_per_second else None

    @property
    def seed_name(self) -> str:
        return "seed unknown" if self.seed is None else f"seed {self.seed}"

    @property
    def short_name(self) -> str:
        """Precision, seed and name, for sentences."""
        return f"{self.precision.value}, {self.seed_name} ({self.name})"

    @property
    def is_only_fp32(self) -> bool:
        """Whether its precision is `tf32` on a device without TF32."""
        return self.precision is Precision.TF32 and not self.machine.has_tf32


@dataclass(frozen=True)
class Summary:
    """The runs of one precision; `Summary.of` makes it.

    Args:
        precision: The precision.
        runs: The completed runs, by seed.
        failed: The failed runs.
        mean: Mean of the compared metric at the end, over the completed runs.
        std: Standard deviation over them; None with fewer than two.
        samples_per_second: The spread of the runs' medians.
        peak_memory_mib: The spread over the runs.
        data_wait_share: Share of the time that the loop waited for data: the median over the runs.
    """

    precision: Precision
    runs: Sequence[MeasuredRun]
    failed: Sequence[MeasuredRun]
    mean: float | None
    std: float | None
    samples_per_second: Spread | None
    peak_memory_mib: Spread | None
    data_wait_share: float | None

    @staticmethod
    def of(precision: Precision, runs: Sequence[MeasuredRun], metric: str) -> Summary:
        """The summary of completed and failed runs of one precision."""
        ordered = sorted(runs, key=lambda run: (run.seed or 0, run.name))
        completed = [run for run in ordered if not run.state.is_failure]
        values = [run.metrics[metric] for run in completed]
        waits = _spread(completed, lambda run: run.data_wait_share)
        return Summary(
            precision=precision,
            runs=completed,
            failed=[run for run in ordered if run.state.is_failure],
            mean=mean(values) if values else None,
            std=stdev(values) if len(values) > 1 else None,
            samples_per_second=_spread(completed, lambda run: run.speed),
            peak_memory_mib=_spread(completed, lambda run: run.peak_memory_mib),
            data_wait_share=waits.median if waits else None,
        )

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
    def waits_for_data(self) -> bool:
        return (self.data_wait_share or 0.0) > WAITS_FOR_DATA

    def spread(self, value: Callable[[MeasuredRun], float | None]) -> Spread | None:
        """The spread over the completed runs that have the value."""
        return _spread(self.runs, value)


def _spread(
    runs: Sequence[MeasuredRun], value: Callable[[MeasuredRun], float | None]
) -> Spread | None:
    return Spread.of([number for run in runs if (number := value(run)) is not None])


def summaries(runs: Sequence[MeasuredRun], metric: str) -> list[Summary]:
    """A summary for each precision that has a run, in the order of `Precision`."""
    by_precision = {p: [run for run in runs if run.precision is p] for p in Precision}
    return [Summary.of(p, found, metric) for p, found in by_precision.items() if found]


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
        precision: The precision to judge.
        against: The precision to compare with.
        smaller_is_better: Direction of the metric.
        margin: Difference of the metric that does not matter.
        speed: Ratio of samples per second; None if not measured.
        memory: Ratio of allocated memory; None if not measured, as on a CPU.
        difference: Difference of the metric, ours minus base.
        verdict: The verdict on the metric.
        lost_runs: Number of failed runs of the precision to judge.
        claims: The claims of the literature, judged; empty if they were not asked for.
    """

    precision: Precision
    against: Precision
    smaller_is_better: bool
    margin: float
    speed: Ratio | None
    memory: Ratio | None
    difference: Interval
    verdict: Equivalence
    lost_runs: int
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


def compare(
    ours: Summary,
    base: Summary,
    metric: str,
    *,
    smaller_is_better: bool,
    margin: float,
    judge_claims: bool = False,
) -> Comparison:
    """Compare two precisions; both must have completed runs with the metric."""
    speed = speed_ratio(ours, base)
    memory = _ratio(ours, base, _allocated) if ours.runs[0].machine.on_gpu else None
    measured = difference(ours, base, metric)
    claims: Sequence[Claim] = ()
    if judge_claims and ours.precision.autocast_dtype:
        everything = [run.metrics.get(ACCURACY) for run in (*ours.runs, *base.runs)]
        # An accuracy above 1 is in percent, and the claim is on a share.
        has_accuracy = all(value is not None and value <= 1.0 for value in everything)
        accuracy = difference(ours, base, ACCURACY) if has_accuracy else None
        claims = judge_all(
            speed=(speed.low, speed.high) if speed else None,
            memory=(memory.low, memory.high) if memory else None,
            accuracy=accuracy.known_range if accuracy else None,
        )
    return Comparison(
        precision=ours.precision,
        against=base.precision,
        smaller_is_better=smaller_is_better,
        margin=margin,
        speed=speed,
        memory=memory,
        difference=measured,
        verdict=measured.verdict(margin),
        lost_runs=len(ours.failed),
        claims=claims,
    )


def comparisons(
    found: Sequence[Summary], base: Precision, metric: str, **options: Any
) -> list[Comparison]:
    """Compare every precision with the baseline, and AMP also with `tf32` on devices with TF32.

    Many programs run in TF32 on such devices if they do not use AMP.

    Args:
        found: The summaries.
        base: The baseline.
        metric: The compared metric.
        options: See `compare`.
    """
    completed = {s.precision: s for s in found if s.runs}
    real = {p: s for p, s in completed.items() if not s.is_only_fp32}
    pairs = [(s, completed[base]) for p, s in real.items() if p is not base]
    if base is Precision.FP32 and Precision.TF32 in real:
        pairs += [(s, real[Precision.TF32]) for p, s in real.items() if p.autocast_dtype]
    return [compare(ours, theirs, metric, **options) for ours, theirs in pairs]


def speed_ratio(ours: Summary, base: Summary) -> Ratio | None:
    """The ratio of samples per second; None if not measured."""
    return _ratio(ours, base, lambda run: run.samples_per_second)


def difference(ours: Summary, base: Summary, metric: str) -> Interval:
    """The difference of a metric that all completed runs have.

    It is paired by seed if both precisions have two or more seeds in common.
    """
    pairs = _by_seed(ours, base)
    if len(pairs) > 1 or (pairs and min(len(ours.runs), len(base.runs)) < 2):
        return paired(
            *zip(*((a.metrics[metric], b.metrics[metric]) for a, b in pairs), strict=True)
        )
    return welch(*([run.metrics[metric] for run in side.runs] for side in (ours, base)))


def _by_seed(ours: Summary, base: Summary) -> list[tuple[MeasuredRun, MeasuredRun]]:
    theirs = {run.seed: run for run in base.runs if run.seed is not None}
    return [(run, theirs[run.seed]) for run in ours.runs if run.seed in theirs]


def _ratio(
    ours: Summary, base: Summary, value: Callable[[MeasuredRun], Spread | None]
) -> Ratio | None:
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
    return Ratio(_middle(ratios), low, high, len(pairs), bool(by_seed))


def _middle(ratios: Sequence[float]) -> float:
    """The median of ratios, which inverts if they do: of an even number the geometric mean."""
    return math.sqrt(median_low(ratios) * median_high(ratios))


def _allocated(run: MeasuredRun) -> Spread | None:
    # The last report has the largest peak: after the reset that follows the first batches, peaks
    # only grow.
    return Spread.of([run.peak_memory_mib] if run.peak_memory_mib else [])
