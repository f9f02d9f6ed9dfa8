"""Describes one run: how it was made, what it reported, and how it ended.

A local run writes this into its folder, see `runs.folder`. On a cluster the platform
has most of it, and the metadata of the run have the rest.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from determined_amp.amp.errors import one_line
from determined_amp.amp.metric_names import AuditMetricName, MetricName
from determined_amp.amp.plain_data import Config, Values
from determined_amp.amp.settings import Precision, scale_text
from determined_amp.experiment.machine import Machine

# Settings by their dotted names, see `Experiment.settings`.
AMP = "hyperparameters.amp"
PRECISION = f"{AMP}.precision"
BATCH_SIZE = "hyperparameters.global_batch_size"
TRAINING = "hyperparameters.training"
LENGTH = f"{TRAINING}.max_length"
SEED = "reproducibility.experiment_seed"
METRIC, SMALLER_IS_BETTER = "searcher.metric", "searcher.smaller_is_better"
TRIAL = "hyperparameters.trial"

ACCURACY = "validation_accuracy"
FAULTS = "faults"  # the metric of a run that examined its trial, see `check`
# If a search varies the initial loss scale or the precision, `Run.hparams` has it under
# these names.
SCALE = "amp.init_scale"
COMPARED = "amp.precision"


class RunState(str, enum.Enum):
    """How far a run has come."""

    RUNNING = "running"  # its process still runs, or was killed
    KILLED = "killed"  # recorded as running, but its process is gone
    COMPLETED = "completed"
    STOPPED = "stopped"  # by a signal, its machine or the trial; it can be resumed
    PRUNED = "pruned"  # ended early by its search
    INVALID = "invalid"  # its hyperparameters cannot train: a result of its search
    FAILED = "failed"

    @property
    def is_failure(self) -> bool:
        """Whether it has no result, because of an error or its hyperparameters."""
        return self in (RunState.FAILED, RunState.INVALID)


_WITHOUT_AN_END = {
    RunState.RUNNING: "it is running",
    RunState.KILLED: "its process is gone",
}

# The states of a run that counts in a comparison.
HAVE_ENDED = (RunState.COMPLETED, RunState.FAILED, RunState.INVALID)


@dataclass(frozen=True)
class Part:
    """The batches that one process trained: from the start of the run, or from a
    resume.
    """

    first_batch: int = 0  # number of batches trained before this part
    # The whole configuration, defaults included, by dotted name; empty if unknown.
    settings: Config = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)  # the machine it trained on
    date: str | None = None  # when it began, ISO 8601; None if unknown
    command: Sequence[str] = ()  # the command line; empty if unknown

    @property
    def what_it_trains(self) -> Config:
        """The settings and machine facts that decide what the part trains, by name."""
        decide = {
            name: value
            for name, value in self.settings.items()
            if not name.startswith(_MAY_CHANGE)
        }
        return {**self.machine.facts, **decide}


# Other programs write these numbers as text in JSON.
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


@dataclass(frozen=True)
class Report:
    """One report of a run."""

    batches: int  # number of batches trained before this report
    metrics: Mapping[str, float]  # numbers by name; they may be infinite or NaN

    @staticmethod
    def read(line: Values) -> Report:
        """The report with the numbers of a line; NaN and infinities may be text."""
        numbers = {
            name: float(value)
            for name, value in line.items()
            if isinstance(value, (int, float)) or value in _NOT_FINITE
        }
        return Report(int(numbers.pop("batches")), numbers)


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


_NONE = Report(0, {})


@dataclass(frozen=True)
class Run:
    """A training run, or a trial of a search that was scored and not trained."""

    name: str  # its folder, or its trial and master
    state: RunState  # how far it has come
    reason: str = ""  # why it failed or was stopped; empty if it completed
    parts: tuple[Part, ...] = ()  # what was trained, in order; empty if unknown
    trained: Sequence[Report] = ()  # the training reports, in their order
    validations: Sequence[Report] = ()  # the validation reports, in their order
    number: int = 0  # its number in the search; on a cluster the id of the trial
    # The hyperparameters from its search, by dotted name.
    hparams: Config = field(default_factory=dict)
    # Whether other runs used the device at the same time; then speeds do not count.
    shares_device: bool = False

    @property
    def settings(self) -> Config:
        """The settings of its last part; empty if unknown."""
        return self.parts[-1].settings if self.parts else {}

    @property
    def machine(self) -> Machine:
        """The machine of its last part."""
        return self.parts[-1].machine if self.parts else Machine()

    @property
    def date(self) -> str | None:
        """When it began, ISO 8601; None if unknown."""
        return self.parts[0].date if self.parts else None

    @property
    def changes(self) -> list[str]:
        """A sentence for each fact of its training that changed at a resume."""
        said = []
        for before, now in pairwise(self.parts):
            for text in changes_between(before.what_it_trains, now.what_it_trains):
                said.append(f"{text} at the resume after {now.first_batch} batches")
        if any(_MAY_BE_OF_AN_OPTIMIZER.match(text) for text in said):
            said.append(_OPTIMIZERS_STAY)
        return said

    @property
    def precision(self) -> Precision:
        return Precision(self.settings[PRECISION])

    @property
    def seed(self) -> int | None:
        """Seed of parameters and data order; None if unknown."""
        return self.settings.get(SEED)

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
    def training(self) -> Report:
        """The last training report; an empty one of 0 batches if there is none."""
        return self.trained[-1] if self.trained else _NONE

    @property
    def validated(self) -> Report:
        """The last validation report; an empty one of 0 batches if there is none."""
        return self.validations[-1] if self.validations else _NONE

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last validation metrics."""
        return self.validated.metrics

    def last(self, name: str) -> float | None:
        """A number of the last training report, summed over the optimizers.

        None if the number is missing, or the sum is not finite.
        """
        metrics = self.training.metrics
        numbers = [metrics[n] for n in metrics if re.fullmatch(rf"{name}(_\d+)?", n)]
        total = sum(numbers)
        return total if numbers and math.isfinite(total) else None

    @property
    def audit_share(self) -> float | None:
        """Share of the first batch's FLOPs in the configured precision, as the minimum
        over processes; None without an audit.
        """
        name = AuditMetricName.SHARE
        shares = [r.metrics[name] for r in self.trained if name in r.metrics]
        return min(shares, default=None)

    @property
    def _steady(self) -> Iterator[Mapping[str, float]]:
        """The metrics of the training reports whose speed counts.

        The first report of a process does not count, because it includes the audit,
        allocations, and the timing of algorithms.
        """
        for report in self.trained[1:]:
            speed = report.metrics.get(MetricName.SAMPLES_PER_SECOND, 0.0)
            if AuditMetricName.SHARE not in report.metrics and 0.0 < speed < math.inf:
                yield report.metrics

    @property
    def speed(self) -> Spread | None:
        """Samples per second in steady reports; None without any, or on a shared
        device.
        """
        speeds = [metrics[MetricName.SAMPLES_PER_SECOND] for metrics in self._steady]
        return None if self.shares_device else Spread.of(speeds)

    @property
    def data_wait_share(self) -> float | None:
        """Share of time that the loop waited for data: the median of steady reports."""
        name = MetricName.DATA_WAIT_SHARE
        waits = [metrics[name] for metrics in self._steady if name in metrics]
        return median(waits) if waits else None

    @property
    def scale_log2(self) -> float:
        """log2 of the initial loss scale; NaN if there is none.

        The metric `init_scale_log2` takes precedence, because a sampled scale is
        rounded before use.
        """
        if "init_scale_log2" in self.metrics:
            return self.metrics["init_scale_log2"]
        scale = self.hparams.get(SCALE)
        if isinstance(scale, (int, float)) and scale > 0:
            return math.log2(scale)
        return math.nan

    @property
    def skipped_steps(self) -> float | None:
        """Number of skipped optimizer steps, 0 without a loss scale; None if
        unknown.
        """
        skipped = self.last(MetricName.SKIPPED_STEPS)
        if skipped is None and self.last(MetricName.APPLIED_STEPS) is not None:
            return 0.0
        return skipped

    def reported(self, lines: Iterable[Values]) -> Run:
        """Add reports to this run, and judge its state and reason by them.

        A run that has validated after its last batch has completed, even if it was
        killed before it recorded that. A completed run whose last validation is not
        finite has failed.

        Args:
            lines: The reports, each with its `group` and `batches`.
        """
        reports = [(line["group"], Report.read(line)) for line in lines]
        made = replace(
            self,
            trained=[report for group, report in reports if group == "training"],
            validations=[report for group, report in reports if group == "validation"],
        )
        state, reason = made._judged()
        return replace(made, state=state, reason=reason)

    def _judged(self) -> tuple[RunState, str]:
        state, settings = self.state, self.settings
        unit = "batches" if settings.get(f"{LENGTH}.epochs") is None else "epochs"
        length = settings.get(f"{LENGTH}.{unit}", math.inf)  # infinite if unknown
        trained, validated = (
            report.batches if unit == "batches" else report.metrics.get(unit, 0)
            for report in (self.training, self.validated)
        )
        trained = max(trained, validated)
        of = "" if length == math.inf else f" of {length:.10g}"
        progress = f"{trained:.10g}{of} {unit}"
        if state.is_failure:
            ended = f"; it ended after {progress}" if trained < length else ""
            return state, one_line(self.reason or "its log has the reason") + ended
        whole = state is RunState.COMPLETED or validated >= length
        if whole and self.validations:
            lost = _not_finite(self.validated, str(settings.get(METRIC)))
            return (RunState.FAILED, lost) if lost else (RunState.COMPLETED, "")
        why = _WITHOUT_AN_END.get(state) or self.reason or "it was stopped"
        early = RunState.STOPPED if state is RunState.COMPLETED else state
        return early, one_line(f"{progress}: {why}")


def _not_finite(last: Report, metric: str) -> str:
    """Which metric of the last validation is not finite, in words; empty if none.

    The searcher's metric decides if it was reported. Otherwise any metric decides.
    """
    for name in [metric] if metric in last.metrics else last.metrics:
        if not math.isfinite(last.metrics[name]):
            return f"{name} is {last.metrics[name]} at the end"
    return ""


def metric_of(runs: Sequence[Run]) -> str:
    """The accuracy if all of some runs report it, else the metric of their searcher."""
    if all(ACCURACY in run.metrics for run in runs):
        return ACCURACY
    return str(runs[0].settings.get(METRIC))


def changes_between(before: Config, now: Config) -> list[str]:
    """A sentence for each setting that differs between two trainings."""
    said = []
    for name in {**before, **now}:
        old, new = (shown_setting(name, facts.get(name)) for facts in (before, now))
        if old != new:
            said.append(f"{name} changed from {old} to {new}")
    return said


def shown_setting(name: str, value: Any) -> Any:
    """A setting for a reader: a loss scale becomes text as a power of two."""
    is_scale = name.rpartition(".")[2] in ("init_scale", "min_scale")
    if is_scale and isinstance(value, (int, float)):
        return scale_text(value)
    return value


def curve_of(reports: Sequence[Report], metric: str) -> list[tuple[int, float]]:
    """The batches and the value of each report that has a metric."""
    return [(r.batches, r.metrics[metric]) for r in reports if metric in r.metrics]


# Matches a sentence on a changed hyperparameter of the trial.
_MAY_BE_OF_AN_OPTIMIZER = re.compile(r"hyperparameters\.(?!amp\.)")
_OPTIMIZERS_STAY = (
    "a resume keeps the settings of the optimizers, such as a constant rate, whatever "
    "its YAML says"
)

# A resume may change these settings, because they do not change what a batch trains.
_MAY_CHANGE = ("name", f"{TRAINING}.", "searcher.", "checkpoint_policy", "profiling.")
