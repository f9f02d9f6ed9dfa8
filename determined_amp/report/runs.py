"""The runs of a report, from run folders, local searches or a master."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from determined_amp.amp.metrics import MetricName
from determined_amp.audit.report import AuditMetricName
from determined_amp.experiment.amp_settings import Precision
from determined_amp.experiment.errors import UserError, one_line
from determined_amp.experiment.experiment import searcher_of
from determined_amp.experiment.training import LENGTH_UNITS
from determined_amp.finder.score import bits_from_default
from determined_amp.local.folder import End
from determined_amp.report.run_settings import BATCH_SIZE, LENGTH, PRECISION

SCALE = "init_scale"

_UNKNOWN = "unknown"


class ReportError(UserError):
    """A report cannot be made. The message says why, and what to do."""


class State(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    UNFINISHED = "unfinished"


# Current names of the metrics that older runs report without `watch_`.
_WATCHED = {
    name.removeprefix("watch_"): name
    for names in (MetricName, AuditMetricName)
    for name in vars(names).values()
    if isinstance(name, str) and name.startswith("watch_")
}


def _todays(name: str) -> str:
    """The current name of a metric, which may end in the number of an optimizer."""
    base = re.sub(r"_\d+$", "", name)
    return _WATCHED[base] + name[len(base) :] if base in _WATCHED else name


@dataclass(frozen=True)
class Report:
    """One report of a run.

    Args:
        batches: Number of batches trained before it.
        metrics: Its numbers by name, which may be infinite or NaN. Names from older runs, without
            `watch_`, are replaced with the current names.
        date: Time of the report, ISO 8601; None if unknown.
    """

    batches: int
    metrics: Mapping[str, float]
    date: str | None = None

    def __post_init__(self) -> None:
        named = {_todays(name): value for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", named)


@dataclass(frozen=True)
class Machine:
    """The machine of a run, as far as it is known.

    Args:
        device: The device in words; runs are compared only if these words are equal.
        on_gpu: Whether the device is a GPU.
        has_tf32: Whether the device has TF32; if not, `tf32` is the same as `fp32`.
        torch: Version of torch.
        versions: Other versions, by name.
        date: Start of the run, ISO 8601; None if unknown.
    """

    device: str = _UNKNOWN
    on_gpu: bool = False
    has_tf32: bool = False
    torch: str = _UNKNOWN
    versions: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of some numbers."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """The spread of these values; None without values."""
        return Spread(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Run:
    """A training run, or a trial of a search that was scored and not trained.

    Args:
        name: Its folder, or its trial and master.
        settings: Its whole configuration, defaults included, by dotted name; empty if unknown.
        training: Its training reports, in order; empty for a scored trial.
        validation: Its validation reports, in order.
        state: How it ended.
        reason: Why it failed or was stopped, and after how many batches; empty if it finished.
        seed: Seed of parameters and data order; None if unknown.
        machine: The machine it ran on.
        number: Its number in the search; on a cluster the id of the trial.
        hparams: The hyperparameters from its search, by dotted name.
        shares_device: Whether other runs used the device at the same time; then speeds do not
            count.
    """

    name: str
    settings: Mapping[str, Any]
    training: tuple[Report, ...]
    validation: tuple[Report, ...]
    state: State
    reason: str
    seed: int | None = None
    machine: Machine = Machine()
    number: int = 0
    hparams: Mapping[str, Any] = field(default_factory=dict)
    shares_device: bool = False

    @property
    def precision(self) -> Precision:
        return Precision(self.settings[PRECISION])

    @property
    def short_name(self) -> str:
        """Precision, seed and name, for sentences."""
        return f"{self.precision.value}, {self.seed_name} ({self.name})"

    @property
    def seed_name(self) -> str:
        return "seed unknown" if self.seed is None else f"seed {self.seed}"

    @property
    def is_only_fp32(self) -> bool:
        """Whether its precision is `tf32` on a device without TF32."""
        return self.precision is Precision.TF32 and not self.machine.has_tf32

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last validation metrics."""
        return self.validation[-1].metrics if self.validation else {}

    @property
    def batches(self) -> int:
        """Number of batches trained, or scored, before the last validation."""
        return self.validation[-1].batches if self.validation else 0

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Batches and value of every validation that has the metric."""
        return [(r.batches, r.metrics[metric]) for r in self.validation if metric in r.metrics]

    def last(self, name: str) -> float | None:
        """A number of the last training report."""
        return self.training[-1].metrics.get(name) if self.training else None

    @property
    def audit_share(self) -> float | None:
        """Share of the first batch's FLOPs in the configured precision; the minimum over processes.

        None if it was not audited.
        """
        shares = (
            r.metrics[AuditMetricName.SHARE]
            for r in self.training
            if AuditMetricName.SHARE in r.metrics
        )
        return min(shares, default=None)

    @property
    def speed(self) -> Spread | None:
        """Samples per second in steady reports; None without one, or if it shared the device."""
        if self.shares_device:
            return None
        return Spread.of([r.metrics[MetricName.SAMPLES_PER_SECOND] for r in self._steady()])

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time that the loop waited for data: the median over steady reports."""
        shares = [r.metrics.get(MetricName.DATA_WAIT_SHARE) for r in self._steady()]
        known = Spread.of([share for share in shares if share is not None])
        return known.median if known else None

    @property
    def training_seconds(self) -> float | None:
        """Seconds to train all samples at its median speed, without validation and checkpoints."""
        batch_size = self.settings[BATCH_SIZE]
        if self.speed is None or batch_size is None:
            return None
        return float(self.training[-1].batches * batch_size / self.speed.median)

    def _steady(self) -> list[Report]:
        """The reports that have a speed, without the first report of every process.

        The first one includes the audit, allocations, and the timing of algorithms.
        """
        return [
            report
            for i, report in enumerate(self.training)
            if i and AuditMetricName.SHARE not in report.metrics
            if report.metrics.get(MetricName.SAMPLES_PER_SECOND, 0.0) > 0.0
        ]

    @property
    def scale_log2(self) -> float:
        """log2 of the initial loss scale; NaN if it has none.

        The metric `init_scale_log2` takes precedence: a sampled scale is rounded before use.
        """
        if "init_scale_log2" in self.metrics:
            return self.metrics["init_scale_log2"]
        scale = next((value for name, value in self.hparams.items() if is_scale(name)), None)
        return math.log2(scale) if isinstance(scale, (int, float)) and scale > 0 else math.nan

    @property
    def is_scored(self) -> bool:
        """Whether it was measured on frozen parameters, not trained."""
        return "loss_scale_score" in self.metrics

    @property
    def skipped_steps(self) -> float | None:
        """Number of skipped optimizer steps, 0 without a loss scale; None if unknown."""
        reported = self.last(MetricName.SKIPPED_STEPS)
        skipped = self.metrics.get(MetricName.SKIPPED_STEPS) if reported is None else reported
        steps = self.last(MetricName.APPLIED_STEPS)
        return 0.0 if skipped is None and steps is not None else skipped

    @property
    def overflow(self) -> bool | None:
        """Whether its first steps overflow; None if that was not measured."""
        found = self.metrics.get("overflow")
        return None if found is None else bool(found)


@dataclass(frozen=True)
class Source:
    """The runs of one source: a run folder, a search, or an experiment on a cluster.

    Args:
        origin: The folder, or the experiment and its master.
        runs: All of its runs.
        config: Configuration of the search or experiment; empty for a run folder.
        left_out: A sentence for each precision that was not trained at all.
        notes: Further sentences for the report.
    """

    origin: str
    runs: tuple[Run, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.origin))

    @property
    def metric(self) -> str:
        """The validation metric that ranks the runs."""
        return str(searcher_of(self.config).metric)

    @property
    def also_searched(self) -> tuple[str, ...]:
        """Hyperparameters besides the loss scale that differ between runs."""
        names = dict.fromkeys(name for run in self.runs for name in run.hparams)
        return tuple(
            name
            for name in names
            if not is_scale(name) and len({repr(run.hparams.get(name)) for run in self.runs}) > 1
        )

    @property
    def counts_lost_steps(self) -> bool:
        """Whether its trials have a score of lost steps; older versions had other scores."""
        scored = [run.metrics for run in self.runs if run.is_scored]
        return bool(scored) and all("steps_lost" in metrics for metrics in scored)

    def ranked(self) -> list[Run]:
        """The runs that reported a finite metric, best first; of equals those nearest to 2^16."""
        return searcher_of(self.config).best_first(
            self.runs,
            lambda run: run.metrics.get(self.metric),
            lambda run: bits_from_default(run.scale_log2),
        )


def is_scale(name: str) -> bool:
    """Whether a dotted name names an initial loss scale."""
    return name.rpartition(".")[2] == SCALE


def ended(
    settings: Mapping[str, Any],
    training: Sequence[Report],
    validation: Sequence[Report],
    end: End | None,
) -> tuple[State, str]:
    """How a run ended, and why.

    Args:
        settings: The settings of the run; empty if unknown.
        training: Its training reports.
        validation: Its validation reports.
        end: The end as recorded by the run, its search or its master; None if not recorded.
    """
    unit = next((u for u in LENGTH_UNITS if settings.get(f"{LENGTH}.{u}") is not None), "batches")
    length = settings.get(f"{LENGTH}.{unit}", math.inf)
    validated = _length(validation, unit)
    trained = max(validated, _length(training, unit))
    came = f"{trained:g} of {length:g} {unit}" if settings else f"{trained:g} {unit}"
    if end is not None and end.state == "failed":
        after = f"; it ended after {came}" if trained < length else ""
        return State.FAILED, one_line(end.reason or "its log has the reason") + after
    if validated >= length or (end is not None and end.state == "completed" and validation):
        broken = [n for n, v in validation[-1].metrics.items() if not math.isfinite(v)]
        if broken:
            return State.FAILED, f"{broken[0]} is {validation[-1].metrics[broken[0]]} at the end"
        return State.FINISHED, ""
    if end is None:
        return State.UNFINISHED, f"{came}: it is running, or was killed"
    return State.STOPPED, one_line(f"{came}: {end.reason or 'it was stopped'}")


def _length(reports: Sequence[Report], unit: str) -> float:
    if not reports:
        return 0
    last = reports[-1]
    return last.batches if unit == "batches" else last.metrics.get(unit, 0)
