"""All runs of one precision together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from determined_amp.config.amp import Precision
from determined_amp.reports.precision.fair import is_only_fp32
from determined_amp.reports.precision.run import Machine, Run, Spread, State

# A loop that waits for data for more than this share of its time is not made faster by AMP.
WAITS_FOR_DATA = 0.2


@dataclass(frozen=True)
class Summary:
    """The runs of one precision.

    Args:
        precision: Theirs.
        runs: Those that finished, by seed.
        failed: Those that failed.
        metric: Validation metric that is compared.
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
        """What they ran on, the same for all runs that are compared."""
        return (*self.runs, *self.failed)[0].machine

    @property
    def is_only_fp32(self) -> bool:
        """Whether it is `tf32` on a device that has none."""
        return is_only_fp32((*self.runs, *self.failed)[0])

    @property
    def seeds(self) -> tuple[int, ...]:
        """Of the finished runs, as far as they are known."""
        return tuple(run.seed for run in self.runs if run.seed is not None)

    def values(self, metric: str | None = None) -> list[float]:
        """The metric after the last validation of every finished run that has it."""
        return self._known(lambda run: run.final(metric or self.metric))

    @property
    def mean(self) -> float | None:
        values = self.values()
        return mean(values) if values else None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the metric over seeds; None of one."""
        values = self.values()
        return stdev(values) if len(values) > 1 else None

    @property
    def speed(self) -> Spread | None:
        """Samples per second: of the medians of the runs."""
        return self.spread(lambda run: run.speed.middle if run.speed else None)

    @property
    def memory(self) -> Spread | None:
        """Peak memory in MiB: allocated by torch on a GPU, resident on a CPU."""
        return self.spread(lambda run: run.last("peak_memory_mib"))

    @property
    def reserved_memory(self) -> Spread | None:
        """Peak of the GPU memory that torch held, in MiB."""
        return self.spread(lambda run: run.last("peak_reserved_memory_mib"))

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time that the loop waited for data: the median of the runs."""
        shares = self.spread(lambda run: run.data_wait_share)
        return shares.middle if shares else None

    @property
    def waits_for_data(self) -> bool:
        return (self.data_wait_share or 0.0) > WAITS_FOR_DATA

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """Median and range over the finished runs that have the value."""
        return Spread.of(self._known(value))

    def _known(self, value: Callable[[Run], float | None]) -> list[float]:
        values = (value(run) for run in self.runs)
        return [found for found in values if found is not None]


def summaries(runs: Sequence[Run], metric: str) -> list[Summary]:
    """One per precision that has a finished or a failed run, in the order of `Precision`."""

    def having(precision: Precision, state: State) -> tuple[Run, ...]:
        found = [run for run in runs if run.precision is precision and run.state is state]
        return tuple(sorted(found, key=lambda run: (run.seed or 0, run.name)))

    made = [
        Summary(p, having(p, State.FINISHED), having(p, State.FAILED), metric) for p in Precision
    ]
    return [summary for summary in made if summary.runs or summary.failed]
