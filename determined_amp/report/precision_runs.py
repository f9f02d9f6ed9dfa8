"""Groups runs by precision, and compares two precisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from determined_amp.amp.errors import UserError
from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import Precision
from determined_amp.report import Runs
from determined_amp.report.change import RATIO_MARGIN, Change, Judgement, change_of
from determined_amp.runs.run import Run, Spread


def counted(count: int, noun: str) -> str:
    """A number with its noun, such as "1 seed" or "2 seeds"."""
    return f"{count} {noun}{'s' * (count != 1)}"


@dataclass(frozen=True)
class PrecisionRuns:
    """The runs in one precision."""

    precision: Precision
    runs: list[Run]  # the completed runs, sorted by seed
    failed: list[Run]  # the failed runs
    metric: str  # the compared metric

    @property
    def name(self) -> str:
        return self.precision.value

    @property
    def values(self) -> list[float]:
        """The compared metric at the end of each completed run."""
        return [run.metrics[self.metric] for run in self.runs]

    @property
    def data_wait_share(self) -> float | None:
        """Share of time that the loop waited for data, as the median over the runs."""
        waits = self.spread(lambda run: run.data_wait_share)
        return waits.median if waits else None

    @property
    def audit_share(self) -> float | None:
        """The smallest audited share of the runs; None if no run was audited."""
        shares = self.spread(lambda run: run.audit_share)
        return shares.low if shares else None

    def last(self, name: str) -> Spread | None:
        """The spread over the runs of a number in their last training reports."""
        return self.spread(lambda run: run.last(name))

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """The spread over the completed runs that have the value."""
        values = [value(run) for run in self.runs]
        return Spread.of([number for number in values if number is not None])


def by_precision(runs: Runs, metric: str) -> list[PrecisionRuns]:
    """The runs of each precision that has runs, in the order of `Precision`."""
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
class Pair:
    """What one precision changes against another, in pairs of runs with equal seeds."""

    precision: Precision  # the precision to judge
    against: Precision  # the precision to compare with
    speed: Change | None  # of samples per second; None if not measured
    memory: Change | None  # of allocated memory; None on a CPU, or if not measured
    metric: Change  # of the compared metric
    lost_runs: int  # number of failed runs of the precision to judge

    @property
    def times_as_fast(self) -> float:
        """The ratio of samples per second; 0 if it was not measured."""
        return math.exp(self.speed.mean) if self.speed else 0.0

    @property
    def is_open(self) -> bool:
        """Whether the speed was not measured, or a verdict is unknown."""
        changes = [self.metric, self.memory, self.speed]
        verdicts = [change.judgement for change in changes if change is not None]
        return self.speed is None or Judgement.UNKNOWN in verdicts


def pair_of(
    candidate: PrecisionRuns,
    base: PrecisionRuns,
    margin: float,
    *,
    more_is_better: bool,
) -> Pair:
    """Compare a precision with another one. `margin` is the margin of the metric.

    Raises:
        UserError: if their runs have no seed in common.
    """
    others = {run.seed: run for run in base.runs if run.seed is not None}
    twins = [(run, others[run.seed]) for run in candidate.runs if run.seed in others]
    if not twins:
        raise UserError(
            f"{candidate.name} and {base.name} have no seed in common; allowed: runs "
            "with equal seeds, as `hyperparameters.trial_seed` gives the trials of a "
            "search"
        )
    name = candidate.metric
    differences = [run.metrics[name] - other.metrics[name] for run, other in twins]
    speed = _ratio(twins, speed_of, more_is_better=True)
    memory = None
    if candidate.runs[0].machine.on_gpu:
        # The last report has the largest peak: after the reset that follows the first
        # batches, peaks only grow.
        memory = _ratio(
            twins,
            lambda run: run.last(MetricName.PEAK_MEMORY_MIB),
            more_is_better=False,
        )
    metric = change_of(differences, margin, more_is_better=more_is_better)
    if metric.low == metric.high:  # with few validation samples this can be chance
        metric = replace(metric, low=math.nan, high=math.nan)
    lost = len(candidate.failed)
    return Pair(candidate.precision, base.precision, speed, memory, metric, lost)


def _ratio(
    twins: Sequence[tuple[Run, Run]],
    value: Callable[[Run], float | None],
    *,
    more_is_better: bool,
) -> Change | None:
    """The change of a ratio, over the pairs in which both runs have the number."""
    numbers = [(value(run), value(other)) for run, other in twins]
    logs = [math.log(mine / its) for mine, its in numbers if mine and its]
    if not logs:
        return None
    return change_of(logs, RATIO_MARGIN, more_is_better=more_is_better, is_ratio=True)


def speed_of(run: Run) -> float | None:
    """The median of a run's samples per second; None if it reports no speed."""
    return run.speed.median if run.speed else None
