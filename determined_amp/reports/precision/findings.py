"""Everything that a report says in numbers, from the runs it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from determined_amp.config.amp import Precision
from determined_amp.reports.precision import fair
from determined_amp.reports.precision.comparison import Comparison, Ratio, comparisons, speed_ratio
from determined_amp.reports.precision.run import Machine, Reading, Run, State
from determined_amp.reports.precision.settings import ACCURACY, METRIC, SMALLER_IS_BETTER
from determined_amp.reports.precision.summary import Summary, summaries
from determined_amp.reports.sources import ReportError

_ACCURACY_MARGIN = 0.003
_RELATIVE_MARGIN = 0.01


@dataclass(frozen=True)
class Findings:
    """The comparison of some runs.

    Args:
        metric: Validation metric that is compared.
        smaller_is_better: Its direction.
        margin: Difference of the metric that does not matter.
        baseline: What the others are held against.
        runs: Finished and failed ones.
        summaries: By precision, in the order of `Precision`.
        comparisons: Those with the baseline first.
        left_out: Sentences on runs that count for nothing, and why.
    """

    metric: str
    smaller_is_better: bool
    margin: float
    baseline: Precision
    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    comparisons: tuple[Comparison, ...]
    left_out: tuple[str, ...]

    @property
    def machine(self) -> Machine:
        """What all finished runs ran on, but for the date."""
        return next(run for run in self.runs if run.state is State.FINISHED).machine

    @property
    def dates(self) -> tuple[str, ...]:
        """The first and the last day on which a run began, as far as they are known."""
        days = sorted({run.machine.date[:10] for run in self.runs if run.machine.date})
        return tuple(dict.fromkeys(days[:1] + days[-1:]))

    @property
    def drift(self) -> Ratio | None:
        """How far the speed of one and the same computation drifted: tf32 where that is fp32."""
        base = [s for s in self.summaries if s.precision is Precision.FP32]
        same = [s for s in self.summaries if s.is_only_fp32]
        return speed_ratio(same[0], base[0]) if base and same else None

    @property
    def with_baseline(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if c.base.precision is self.baseline)


def find(
    readings: Sequence[Reading],
    metric: str | None = None,
    margin: float | None = None,
    *,
    smaller_is_better: bool | None = None,
) -> Findings:
    """Compare all runs of some sources.

    Args:
        readings: What the sources hold.
        metric: Validation metric; by default the accuracy if all report it, else the searcher's.
        margin: Difference of it that does not matter; by default 0.003 of an accuracy (0.3 of one
            in percent), of another metric 1 % of the baseline's mean.
        smaller_is_better: Its direction; by default the searcher's word, if the metric is its.

    Raises:
        ReportError: if the runs cannot be compared, or do not report the metric.
    """
    everything = [run for reading in readings for run in reading.runs]
    runs = tuple(run for run in everything if run.state is not State.UNFINISHED)
    unfinished = [run for run in everything if run.state is State.UNFINISHED]
    left_out = [f"{run.short_name}: {run.reason}" for run in unfinished]
    left_out += [sentence for reading in readings for sentence in reading.unread]
    if not runs:
        seen = "; left out: " + "; ".join(left_out) if left_out else ""
        raise ReportError(f"no run has finished{seen}; allowed: finished runs of two precisions")
    fair.check(runs)
    finished = [run for run in runs if run.state is State.FINISHED]
    metric = _metric(finished, metric)
    found = summaries(runs, metric)
    if smaller_is_better is None:
        smaller_is_better = _smaller_is_better(finished[0], metric)
    base = fair.baseline(runs)
    margin = _margin(found, base, metric) if margin is None else margin
    compared = comparisons(found, base, smaller_is_better=smaller_is_better, margin=margin)
    return Findings(
        metric=metric,
        smaller_is_better=smaller_is_better,
        margin=margin,
        baseline=base,
        runs=runs,
        summaries=tuple(found),
        comparisons=tuple(compared),
        left_out=tuple(left_out),
    )


def _metric(finished: Sequence[Run], wanted: str | None) -> str:
    reported = [set(run.validation[-1].metrics) for run in finished]
    common = set.intersection(*reported) - {"epochs"}
    chosen = wanted or (ACCURACY if ACCURACY in common else _searched(finished[0]))
    if chosen not in common:
        raise ReportError(
            f"--metric: {chosen} is not in the last validation of every finished run; allowed: "
            f"{', '.join(sorted(common)) or 'nothing, they have no metric in common'}"
        )
    return chosen


def _smaller_is_better(run: Run, metric: str) -> bool:
    """The searcher's word on its own metric; of others, what the name says."""
    if metric == _searched(run):
        return bool(run.settings[SMALLER_IS_BETTER])
    if not is_accuracy(metric) and "loss" not in metric:
        raise ReportError(
            f"--metric: whether a larger or a smaller {metric} is better is unknown; allowed: "
            "--better larger or --better smaller with it"
        )
    return not is_accuracy(metric)


def _searched(run: Run) -> str:
    return str(run.settings[METRIC])


def is_accuracy(metric: str) -> bool:
    """Whether it is one, by its name."""
    return "accuracy" in metric


def _margin(found: Sequence[Summary], base: Precision, metric: str) -> float:
    (mean,) = (summary.mean for summary in found if summary.precision is base)
    assert mean is not None  # every finished run has the metric
    if is_accuracy(metric):
        in_percent = max(value for summary in found for value in summary.values()) > 1.0
        return _ACCURACY_MARGIN * (100 if in_percent else 1)
    return _RELATIVE_MARGIN * abs(mean)
