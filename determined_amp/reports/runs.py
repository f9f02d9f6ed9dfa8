"""Runs as every report sees them, wherever they were read."""

from __future__ import annotations

import enum
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from determined_amp.amp.metrics import MetricName
from determined_amp.audit.report import AuditMetricName
from determined_amp.config.amp import Precision
from determined_amp.config.errors import UserError
from determined_amp.local.folder import End
from determined_amp.reports.run_settings import BATCH_SIZE, LENGTH, LENGTH_UNITS, PRECISION

SCALE = "init_scale"

_REASON_LENGTH = 240
_UNKNOWN = "unknown"


class ReportError(UserError):
    """There is nothing to draw: what was found instead, and what to do."""


class State(enum.Enum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    UNFINISHED = "unfinished"


@dataclass(frozen=True)
class Report:
    """One line of what a run reported.

    Args:
        batches: Trained before it.
        metrics: Its numbers; they may be infinite or NaN.
        date: When it was reported, ISO 8601; None if unknown.
    """

    batches: int
    metrics: Mapping[str, float]
    date: str | None = None


@dataclass(frozen=True)
class Machine:
    """What a run ran on, as far as it is known.

    Args:
        device: In words; runs on devices of different words are not compared.
        on_gpu: Whether memory is that of a GPU.
        has_tf32: Whether its float32 products can be TF32; if not, `tf32` is `fp32`.
        torch: Version.
        versions: Others, by name.
        date: When the run began, ISO 8601; None if unknown.
    """

    device: str = _UNKNOWN
    on_gpu: bool = False
    has_tf32: bool = False
    torch: str = _UNKNOWN
    versions: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some numbers."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of none."""
        return Spread(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Run:
    """A training run, or a trial of a search that was scored and not trained.

    Args:
        name: Where it was read.
        settings: Its whole configuration, defaults included, by dotted name; empty if unknown.
        training: Its training reports, in order; none of a trial that was scored.
        validation: Its validation reports, in order.
        state: How it ended.
        reason: Why it failed or was stopped, and how far it came; empty if it finished.
        seed: Of parameters and data order; None if unknown.
        machine: What it ran on.
        number: In its search; the id of a trial on a cluster.
        hparams: The hyperparameters that its search gave it, by dotted name.
        shares_device: Whether others ran beside it, and its speed is not its own.
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
        """For a sentence: precision, seed, and where it was read."""
        return f"{self.precision.value}, {self.seed_name} ({self.name})"

    @property
    def seed_name(self) -> str:
        return "seed unknown" if self.seed is None else f"seed {self.seed}"

    @property
    def is_only_fp32(self) -> bool:
        """Whether it asked for TF32 on a device that has none."""
        return self.precision is Precision.TF32 and not self.machine.has_tf32

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last validation metrics."""
        return self.validation[-1].metrics if self.validation else {}

    @property
    def batches(self) -> int:
        """Trained, or scored, before the last validation."""
        return self.validation[-1].batches if self.validation else 0

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Batches and value of every validation that has the metric."""
        return [(r.batches, r.metrics[metric]) for r in self.validation if metric in r.metrics]

    def last(self, name: str) -> float | None:
        """A number of the last training report."""
        return self.training[-1].metrics.get(name) if self.training else None

    @property
    def audit_share(self) -> float | None:
        """Share of the first batch's FLOPs in the dtype asked for, the smallest of its processes.

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
        """Samples per second over its steady reports; None if it shared the device."""
        if self.shares_device:
            return None
        return Spread.of([r.metrics[MetricName.SAMPLES_PER_SECOND] for r in self._steady()])

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time that the loop waited for data, the median of its steady reports."""
        shares = [r.metrics.get(MetricName.DATA_WAIT_SHARE) for r in self._steady()]
        known = Spread.of([share for share in shares if share is not None])
        return known.median if known else None

    @property
    def training_seconds(self) -> float | None:
        """Time to train all samples at its median speed: validation and checkpoints not counted."""
        batch_size = self.settings[BATCH_SIZE]
        if self.speed is None or batch_size is None:
            return None
        return float(self.training[-1].batches * batch_size / self.speed.median)

    def _steady(self) -> list[Report]:
        """The reports that have a speed, without the first of every process.

        That one has the audit in it, and batches in which memory is allocated and algorithms are
        timed.
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

        What the run says that it used counts first: a sampled one is rounded to a power of two.
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
        """Optimizer steps that overflowed, if it says so."""
        skipped = self.last(MetricName.SKIPPED_STEPS)
        return self.metrics.get(MetricName.SKIPPED_STEPS) if skipped is None else skipped

    @property
    def overflow(self) -> bool | None:
        """Whether its first steps overflow, if it was measured."""
        found = self.metrics.get("overflow")
        return None if found is None else bool(found)


@dataclass(frozen=True)
class Source:
    """What one source holds: a run folder, a search, or an experiment on a cluster.

    Args:
        origin: Where it was read.
        runs: All of its runs.
        config: Of the search or experiment, as it was given; empty of a run folder.
    """

    origin: str
    runs: tuple[Run, ...]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.origin))

    @property
    def metric(self) -> str:
        """The validation metric that ranks the runs."""
        return str(self.config["searcher"]["metric"])

    @property
    def also_searched(self) -> tuple[str, ...]:
        """Hyperparameters besides the loss scale that differ between runs."""
        names = dict.fromkeys(name for run in self.runs for name in run.hparams)
        return tuple(
            name
            for name in names
            if not is_scale(name) and len({repr(run.hparams.get(name)) for run in self.runs}) > 1
        )

    def ranked(self) -> list[Run]:
        """The runs that reported a finite metric, best first."""
        sign = 1 if self.config["searcher"].get("smaller_is_better", True) else -1
        valued = [run for run in self.runs if math.isfinite(run.metrics.get(self.metric, math.nan))]
        return sorted(valued, key=lambda run: sign * run.metrics[self.metric])


def is_scale(name: str) -> bool:
    """Whether a dotted name is that of an initial loss scale."""
    return name.rpartition(".")[2] == SCALE


def ended(
    settings: Mapping[str, Any],
    training: Sequence[Report],
    validation: Sequence[Report],
    end: End | None,
) -> tuple[State, str]:
    """How a run ended, and why.

    Args:
        settings: Of the run; empty if unknown.
        training: Its training reports.
        validation: Its validation reports.
        end: What the run, its search or its master wrote down; None if nobody did.
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


def one_line(reason: str) -> str:
    """A reason short enough for a sentence."""
    return textwrap.shorten(reason, _REASON_LENGTH, placeholder=" ...")


def _length(reports: Sequence[Report], unit: str) -> float:
    if not reports:
        return 0
    last = reports[-1]
    return last.batches if unit == "batches" else last.metrics.get(unit, 0)
