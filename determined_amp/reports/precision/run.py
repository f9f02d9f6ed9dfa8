"""One training run as the comparison sees it, wherever it was read."""

from __future__ import annotations

import enum
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from determined_amp.config.amp import Precision
from determined_amp.reports.precision.settings import (
    BATCH_SIZE,
    GUARD,
    LENGTH,
    LENGTH_UNITS,
    PRECISION,
)

_REASON_LENGTH = 240


class State(enum.Enum):
    """What became of a run: only a finished one is compared."""

    FINISHED = "finished"
    FAILED = "failed"
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

    device: str
    on_gpu: bool
    has_tf32: bool
    torch: str
    versions: Mapping[str, Any]
    date: str | None


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some numbers."""

    middle: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of none."""
        return Spread(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True)
class Run:
    """A training run.

    Args:
        name: Where it was read.
        settings: Its whole configuration, defaults included, by dotted name.
        machine: What it ran on.
        seed: Of parameters and data order; None if unknown.
        training: Its training reports, in order.
        validation: Its validation reports, in order.
        state: What became of it.
        reason: Why it failed, or how far it came; empty if it finished.
        shares_device: Whether others ran beside it, and its speed is not its own.
    """

    name: str
    settings: Mapping[str, Any]
    machine: Machine
    seed: int | None
    training: tuple[Report, ...]
    validation: tuple[Report, ...]
    state: State
    reason: str
    shares_device: bool = False

    @property
    def precision(self) -> Precision:
        return Precision(self.settings[PRECISION])

    @property
    def short_name(self) -> str:
        """For a sentence: precision, seed, and where it was read."""
        seed = "seed unknown" if self.seed is None else f"seed {self.seed}"
        return f"{self.precision.value}, {seed} ({self.name})"

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """Batches and value of every validation that has the metric."""
        return [(r.batches, r.metrics[metric]) for r in self.validation if metric in r.metrics]

    def final(self, metric: str) -> float | None:
        """The metric of the last validation."""
        return self.validation[-1].metrics.get(metric) if self.validation else None

    def last(self, name: str) -> float | None:
        """A number of the last training report."""
        return self.training[-1].metrics.get(name) if self.training else None

    @property
    def audit_share(self) -> float | None:
        """Share of the first batch's FLOPs in the dtype asked for, the smallest of its processes.

        None if it was not audited.
        """
        return min(self._all("audit_share"), default=None)

    @property
    def speed(self) -> Spread | None:
        """Samples per second over its steady reports; None if it shared the device."""
        if self.shares_device:
            return None
        return Spread.of([r.metrics["samples_per_second"] for r in self._steady()])

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time that the loop waited for data, the median of its steady reports."""
        shares = [r.metrics.get("data_wait_share") for r in self._steady()]
        known = Spread.of([share for share in shares if share is not None])
        return known.middle if known else None

    @property
    def training_seconds(self) -> float | None:
        """Time to train all samples at its median speed: validation and checkpoints not counted."""
        if self.speed is None:
            return None
        batch_size = self.settings[BATCH_SIZE]
        return float(self.training[-1].batches * batch_size / self.speed.middle)

    def _all(self, name: str) -> list[float]:
        return [r.metrics[name] for r in self.training if name in r.metrics]

    def _steady(self) -> list[Report]:
        """The reports that have a speed, but for the first of every process.

        That one has the audit in it, and batches in which memory is allocated and algorithms are
        timed.
        """
        return [
            report
            for i, report in enumerate(self.training)
            if i and "audit_share" not in report.metrics
            if report.metrics.get("samples_per_second", 0.0) > 0.0
        ]


@dataclass(frozen=True)
class Reading:
    """What one source holds.

    Args:
        runs: All runs that have begun.
        unread: Sentences on those of which nothing can be read.
    """

    runs: tuple[Run, ...]
    unread: tuple[str, ...] = ()


def ended(
    settings: Mapping[str, Any], training: Sequence[Report], validation: Sequence[Report]
) -> tuple[State, str]:
    """What became of a run, from its reports alone, and why.

    A run that the guard ended leaves the report that it was ended for: it is told by that from one
    that was stopped or killed.
    """
    unit = next(u for u in LENGTH_UNITS if settings.get(f"{LENGTH}.{u}") is not None)
    length = settings[f"{LENGTH}.{unit}"]
    validated = _length(validation, unit)
    if validated >= length:
        broken = [n for n, v in validation[-1].metrics.items() if not math.isfinite(v)]
        if broken:
            return State.FAILED, f"{broken[0]} is {validation[-1].metrics[broken[0]]} at the end"
        return State.FINISHED, ""
    trouble = "; ".join(_trouble(settings, training))
    trained = max(validated, _length(training, unit))
    came = f"{trained:g} of {length} {unit}"
    if trouble:
        return State.FAILED, f"{trouble}; it ended after {came}"
    return State.UNFINISHED, f"{came}: it is running, or was stopped or killed"


def one_line(reason: str) -> str:
    """A reason short enough for a sentence."""
    return textwrap.shorten(reason, _REASON_LENGTH, placeholder=" ...")


def _length(reports: Sequence[Report], unit: str) -> float:
    if not reports:
        return 0
    last = reports[-1]
    return last.batches if unit == "batches" else last.metrics.get(unit, 0)


def _trouble(settings: Mapping[str, Any], training: Sequence[Report]) -> Iterator[str]:
    """What the guard would end a run for, in its last report.

    In float16 it looks at skipped steps alone: a single batch that overflows is none.
    """
    if not training:
        return
    report: Callable[..., float] = training[-1].metrics.get
    if settings[PRECISION] != Precision.AMP_FP16.value:
        if not math.isfinite(report("loss", 0.0)):
            yield f"the training loss is {report('loss')}"
        return
    floor, most_skips, highest_ratio = (settings[name] for name in GUARD)
    skips, ratio = report("consecutive_skips", 0), report("skip_ratio", 0.0)
    at_floor = report("loss_scale_log2", math.inf) <= math.log2(floor)
    if skips > most_skips or (skips and at_floor):
        yield f"{skips:.0f} optimizer steps in a row were skipped"
    elif ratio > highest_ratio:
        yield f"{ratio:.0%} of the optimizer steps of the last report were skipped"
