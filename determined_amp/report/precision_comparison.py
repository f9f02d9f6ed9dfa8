"""Compares one precision with another: speed, memory, and the metric with its
confidence interval.

Runs are compared in pairs of equal seed. A difference that is not significant does not
prove equality: two precisions are equal within a margin if the whole 95 % confidence
interval of their difference lies inside the margin.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev

from scipy import stats  # type: ignore[import-untyped]

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import Precision
from determined_amp.report import ReportError, Runs
from determined_amp.runs.run import Run, Spread

# A smaller ratio of speed or memory counts as no difference.
MIN_EFFECT = 1.05

_CONFIDENCE = 0.95


class Equivalence(enum.Enum):
    """The verdict on a difference of the metric."""

    EQUAL = "equal within the margin"
    DIFFERENT = "different"
    UNKNOWN = "cannot tell yet"


class Effect(enum.Enum):
    """The verdict on a ratio, in words; less than `MIN_EFFECT` is no effect."""

    LARGER = "{larger}"
    SMALLER = "{smaller}"
    NOT_LARGER = "not {larger}"  # whether it is smaller is not known
    PERHAPS_LARGER = "{larger} in every pair, cannot tell yet by how much beyond chance"
    PERHAPS_SMALLER = (
        "{smaller} in every pair, cannot tell yet by how much beyond chance"
    )
    UNKNOWN = "cannot tell yet"


def counted(count: int, noun: str) -> str:
    """Such as "1 seed" and "2 seeds"."""
    return f"{count} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Interval:
    """The mean of a difference over pairs of runs, and its 95 % confidence interval."""

    mean: float
    pairs: int
    std: float | None  # standard deviation over the pairs; None with a single one
    low: float  # lower end of the interval; NaN with a single pair
    high: float  # upper end of the interval; NaN with a single pair

    @property
    def seeds(self) -> str:
        return counted(self.pairs, "seed")

    def verdict(self, margin: float) -> Equivalence:
        """Judge the difference; a significant difference within the margin counts as
        equal.

        Without any spread over seeds the verdict is unknown: a metric over few
        validation samples can have the same difference for all seeds by chance.
        """
        if not self.std:
            return Equivalence.UNKNOWN
        if -margin <= self.low and self.high <= margin:
            return Equivalence.EQUAL
        if self.low > 0 or self.high < 0:
            return Equivalence.DIFFERENT
        return Equivalence.UNKNOWN


def interval_of(differences: Sequence[float]) -> Interval:
    """The mean of some differences, and its interval by Student's t-test."""
    middle = mean(differences)
    pairs = len(differences)
    if pairs < 2 or not math.isfinite(middle):
        return Interval(middle, pairs, None, math.nan, math.nan)
    std = stdev(differences)
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, pairs - 1))
    half_width = quantile * std / math.sqrt(pairs)
    return Interval(middle, pairs, std, middle - half_width, middle + half_width)


@dataclass(frozen=True)
class Ratio:
    """The ratio of one precision to another over pairs of runs with equal seeds.

    For a single pair, all ranges are those of the ratios of its reports.
    """

    median: float  # median over the pairs
    low: float  # minimum over the pairs
    high: float  # maximum over the pairs
    pairs: int
    certain_low: (
        float  # lower end of the 95 % interval of the geometric mean over the pairs
    )
    certain_high: float  # its upper end

    @property
    def effect(self) -> Effect:
        """The verdict. An effect must show in every pair, and beyond what may be
        chance.
        """
        is_larger = self.low > 1.0
        is_smaller = self.high < 1.0
        if is_larger and self.certain_low > 1.0 and self.median >= MIN_EFFECT:
            return Effect.LARGER
        if is_smaller and self.certain_high < 1.0 and self.median <= 1.0 / MIN_EFFECT:
            return Effect.SMALLER
        if self.certain_high < MIN_EFFECT:
            return Effect.NOT_LARGER
        if is_larger:
            return Effect.PERHAPS_LARGER
        return Effect.PERHAPS_SMALLER if is_smaller else Effect.UNKNOWN


@dataclass(frozen=True)
class PrecisionRuns:
    """The runs in one precision."""

    precision: Precision
    runs: list[Run]  # the completed runs, by seed
    failed: list[Run]  # the failed runs
    metric: str  # the compared metric

    @property
    def name(self) -> str:
        return self.precision.value

    @property
    def seeds_in_words(self) -> str:
        """The number of runs, and their seeds."""
        count = len(self.runs)
        words = counted(count, "run")
        if self.failed:
            words = f"{words} and {len(self.failed)} failed"
        if not count:
            return words
        seeds = ", ".join(str(run.seed) for run in self.runs)
        return f"{words}, seed{'s' * (count > 1)} {seeds}"

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
        """Standard deviation of the compared metric; None with fewer than two completed
        runs.
        """
        return stdev(self.values) if len(self.runs) > 1 else None

    @property
    def speed(self) -> Spread | None:
        """Samples per second: the spread of the runs' medians."""
        return self.spread(lambda run: run.speed.median if run.speed else None)

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time that the loop waited for data: the median over the runs."""
        waits = self.spread(lambda run: run.reports.data_wait_share)
        return waits.median if waits else None

    @property
    def audit_share(self) -> float | None:
        """Smallest audited share; None if no run was audited."""
        shares = self.spread(lambda run: run.reports.audit_share)
        return shares.low if shares else None

    def last(self, name: str) -> Spread | None:
        """The spread of a number of the last training report."""
        return self.spread(lambda run: run.last(name))

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread over the completed runs that have the value."""
        values = [value(run) for run in self.runs]
        return Spread.of([number for number in values if number is not None])


def by_precision(runs: Runs, metric: str) -> list[PrecisionRuns]:
    """The runs of each precision that has one, in the order of `Precision`."""
    made = {
        precision: PrecisionRuns(precision, [], [], metric) for precision in Precision
    }
    for run in sorted(runs, key=lambda run: (run.seed or 0, run.name)):
        same = made[run.precision]
        if run.state.is_failure:
            same.failed.append(run)
        else:
            same.runs.append(run)
    return [same for same in made.values() if same.runs or same.failed]


@dataclass(frozen=True)
class Comparison:
    """One precision compared with another."""

    precision: Precision  # the precision to judge
    against: Precision  # the precision to compare with
    is_better: bool  # whether the mean of the metric is better, whatever the verdict
    margin: float  # difference of the metric that does not matter
    speed: Ratio | None  # ratio of samples per second; None if not measured
    memory: Ratio | None  # ratio of allocated memory; None if not measured, as on a CPU
    difference: (
        Interval  # difference of the metric, of `precision` minus that of `against`
    )
    verdict: Equivalence
    lost_runs: int  # number of failed runs of the precision to judge

    @property
    def times_as_fast(self) -> float:
        """The median ratio of samples per second; 0 if it was not measured."""
        return self.speed.median if self.speed else 0.0


def compare_precisions(
    candidate: PrecisionRuns,
    base: PrecisionRuns,
    *,
    smaller_is_better: bool,
    margin: float,
) -> Comparison:
    """Compare a precision with another one.

    Raises:
        ReportError: if they have no seed in common.
    """
    others = {run.seed: run for run in base.runs if run.seed is not None}
    pairs = [(run, others[run.seed]) for run in candidate.runs if run.seed in others]
    if not pairs:
        raise ReportError(
            f"{candidate.name} and {base.name} have no seed in common; allowed: runs "
            "with equal seeds, as `hyperparameters.trial_seed` gives the trials of a "
            "search"
        )
    metric = candidate.metric
    differences = [run.metrics[metric] - other.metrics[metric] for run, other in pairs]
    difference = interval_of(differences)
    on_gpu = candidate.runs[0].machine.on_gpu
    speed = _ratio(pairs, lambda run: run.speed)
    is_better = (difference.mean < 0) is smaller_is_better
    return Comparison(
        precision=candidate.precision,
        against=base.precision,
        is_better=is_better,
        margin=margin,
        speed=speed,
        memory=_ratio(pairs, _allocated) if on_gpu else None,
        difference=difference,
        verdict=difference.verdict(margin),
        lost_runs=len(candidate.failed),
    )


def _ratio(
    pairs: Sequence[tuple[Run, Run]], value: Callable[[Run], Spread | None]
) -> Ratio | None:
    """The ratio of a number over those pairs of which both runs have it; None without a
    pair.
    """
    ratios = []
    for run, other in pairs:
        mine = value(run)
        others = value(other)
        if mine and others:
            middle = mine.median / others.median
            ratios.append(
                Spread(middle, mine.low / others.high, mine.high / others.low)
            )
    if not ratios:
        return None
    if len(ratios) == 1:
        (only,) = ratios
        return Ratio(only.median, only.low, only.high, 1, only.low, only.high)
    logs = [math.log(ratio.median) for ratio in ratios]
    certain = interval_of(logs)
    # A median that inverts if the ratios do: of an even number the geometric mean.
    numbers = (median(logs), min(logs), max(logs), certain.low, certain.high)
    middle, low, high, certain_low, certain_high = map(math.exp, numbers)
    return Ratio(middle, low, high, len(logs), certain_low, certain_high)


def _allocated(run: Run) -> Spread | None:
    # The last report has the largest peak: after the reset that follows the first
    # batches, peaks only grow.
    peak = run.last(MetricName.PEAK_MEMORY_MIB) or 0.0
    return Spread.of([peak] if peak > 0 else [])
