"""Plans a comparison: the length of its runs, its time, and how to shorten it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from determined_amp.amp.settings import Precision
from determined_amp.compare.comparable import LEAST_BATCHES, ComparisonRequest
from determined_amp.compare.pilots import PilotResults
from determined_amp.experiment.experiment import Experiment
from determined_amp.report.precision_runs import counted
from determined_amp.search.optimize import GRACE
from determined_amp.search.search_display import minutes

# About the number of reports per run. The first report of a process has no steady
# speed.
_REPORTS = 8

# The time limit of the runs is this multiple of their estimated time. The report after
# them takes `_REPORT_SECONDS`.
_RESERVE = 1.3
_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class ComparisonPlan:
    """The planned runs."""

    batches: int  # length of each run, in batches
    reporting_period: int  # interval of its reports, in batches
    seeds: int = 1  # number of runs in each precision
    seconds: float = 0.0  # estimated time of all runs
    allowed: float = 0.0  # seconds that the user allows the runs

    @property
    def time_limit(self) -> float:
        """Seconds after which the runs are stopped."""
        return max(self.seconds * _RESERVE, self.allowed)

    @property
    def longest_seconds(self) -> float:
        """Upper limit of the total time, including the report, in seconds."""
        return self.time_limit + GRACE + _REPORT_SECONDS


def plan_of(
    results: PilotResults, experiment: Experiment, request: ComparisonRequest
) -> ComparisonPlan:
    """Plan runs of `--batches`, or of as many batches as fit into `--minutes`.

    Without `--batches`, a run has whole reporting periods, and `LEAST_BATCHES` or
    more: shorter runs report no speed.
    """
    pilots = results.pilots.values()
    per_batch = request.seeds * sum(pilot.seconds_per_batch for pilot in pilots)
    overhead = request.seeds * sum(pilot.overhead for pilot in pilots)
    window = experiment.aggregation_frequency
    allowed = 60.0 * request.minutes
    if request.batches is None:
        wanted = (allowed / _RESERVE - overhead) / per_batch
        own = experiment.training.max_length
        epoch = results.pilots[Precision.FP32].epoch_batches
        if own is not None and (own.batches or epoch):
            wanted = min(wanted, own.in_batches(epoch or 1))  # a schedule may end there
        wanted = max(wanted, LEAST_BATCHES)
    else:
        wanted = request.batches
    period = max(int(wanted) // _REPORTS // window, 1) * window
    least = math.ceil(LEAST_BATCHES / period)
    batches = request.batches or max(int(wanted) // period, least) * period
    seconds = overhead + batches * per_batch
    return ComparisonPlan(batches, period, request.seeds, seconds, allowed)


def plan_lines(results: PilotResults, plan: ComparisonPlan) -> Iterator[str]:
    """The lines that say what will run, how long it takes, and how to shorten it."""
    names = [precision.value for precision in results.pilots]
    yield (
        f"plan: {', '.join(names)} in turn, {counted(plan.seeds, 'run')} of "
        f"{plan.batches} batches each: about {minutes(plan.seconds)}, at most "
        f"{minutes(plan.longest_seconds)}"
    )
    if any(pilot.is_cut_short for pilot in results.pilots.values()):
        yield "  validation is not in this estimate: no pilot came so far"
    if plan.seconds > plan.allowed:
        yield (
            f"  that is more than the {minutes(plan.allowed)} of --minutes; shorter: "
            "fewer --precisions or --seeds, --batches "
            f"{LEAST_BATCHES}, or a smaller batch or model by --config; Ctrl-C reports "
            "what is finished"
        )
