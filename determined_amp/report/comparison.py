"""Selects the runs that count for a report on precisions, and compares them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Config, Values
from determined_amp.amp.settings import SCALER_KEYS, Precision
from determined_amp.experiment.machine import Machine
from determined_amp.report import Runs, Sentences
from determined_amp.report.precision_runs import (
    Pair,
    PrecisionRuns,
    by_precision,
    counted,
    pair_of,
)
from determined_amp.runs.run import (
    AMP,
    BATCH_SIZE,
    HAVE_ENDED,
    METRIC,
    PRECISION,
    SEED,
    SMALLER_IS_BETTER,
    Run,
    RunState,
    metric_of,
    shown_setting,
)
from determined_amp.search.search_folder import Search

_ACCURACY_MARGIN = 0.003
_RELATIVE_MARGIN = 0.01

# Compared runs may differ in these settings. The name and the search method do not
# affect the training.
_MAY_DIFFER = frozenset(
    {"name", "searcher.name", SEED, PRECISION, *(f"{AMP}.{key}" for key in SCALER_KEYS)}
)


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in precision and seed only, and what each precision changes."""

    metric: str  # the compared metric
    margin: float  # difference of the metric that does not matter
    baseline: Precision  # the precision that the others are compared with
    # The runs per precision, in the order of `Precision`.
    precisions: Sequence[PrecisionRuns]
    pairs: Sequence[Pair]  # pairs with the baseline come first
    left_out: Sequence[str]  # a sentence for each run or precision that does not count
    notes: Sequence[str]  # further sentences from the sources
    command: str  # what the user typed for these runs, or may type for more

    @property
    def completed(self) -> list[Run]:
        return [run for same in self.precisions for run in same.runs]

    @property
    def settings(self) -> Config:
        """The settings of one completed run; most are the same in all runs."""
        return self.completed[0].settings

    @property
    def machine(self) -> Machine:
        """The machine of the completed runs."""
        return self.completed[0].machine

    @property
    def runs(self) -> list[Run]:
        """The completed and the failed runs."""
        return [run for same in self.precisions for run in (*same.runs, *same.failed)]

    @property
    def setting(self) -> str:
        """Device, torch version, length, batch size, date and seeds, in one line."""
        device = f"{self.machine.device}, torch {self.machine.torch}"
        batches = max(run.training.batches for run in self.runs)
        date = max(run.date or "date unknown" for run in self.runs)
        size = self.settings.get(BATCH_SIZE) or "unknown size"
        seeds = dict.fromkeys(str(run.seed) for run in self.completed)
        return (
            f"{device}, {batches} batches of {size}, {date[:10]}, "
            f"seeds {', '.join(seeds)}"
        )

    @property
    def with_baseline(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.against is self.baseline]

    def against_baseline(self, precision: Precision) -> Pair | None:
        """The pair of a precision with the baseline, if there is one."""
        pairs = self.with_baseline
        return next((pair for pair in pairs if pair.precision is precision), None)


def compare_runs(
    sources: Sequence[Search], metric: str | None = None, margin: float | None = None
) -> Comparison:
    """Compare all runs of some sources.

    Args:
        sources: The searches and single runs to compare.
        metric: Validation metric; by default the accuracy if all finished runs report
            it, else the searcher's metric.
        margin: A smaller difference does not matter. By default 0.003 of an accuracy
            (0.3 in percent), else 1 % of the baseline's mean.

    Raises:
        UserError: if the runs cannot be compared, or do not report the metric.
    """
    countable, left_out = _countable(sources)
    metric = metric or metric_of(_finished(countable))
    runs = [_judged_by(run, metric) for run in countable]
    precisions = by_precision(runs, metric)
    baseline = _baseline(precisions, left_out)
    _check_comparable(runs, metric)
    margin = margin or _margin(baseline)
    more_is_better = not _smaller_is_better(baseline.runs[0], metric)
    pairs = [
        pair_of(candidate, base, margin, more_is_better=more_is_better)
        for candidate, base in _to_compare(precisions, baseline)
    ]
    notes = [note for source in sources for note in source.notes]
    return Comparison(
        metric=metric,
        margin=margin,
        baseline=baseline.precision,
        precisions=precisions,
        pairs=pairs,
        left_out=left_out,
        notes=list(dict.fromkeys(notes)),
        command=sources[0].command,
    )


def _fixed(run: Run) -> Config:
    """The settings in which no run may differ."""
    return {
        name: value for name, value in run.settings.items() if name not in _MAY_DIFFER
    }


def _to_compare(
    precisions: Sequence[PrecisionRuns], baseline: PrecisionRuns
) -> list[tuple[PrecisionRuns, PrecisionRuns]]:
    """Every precision with the baseline, and AMP also with `tf32` on devices with TF32.

    Many programs without AMP run in TF32 where the device has it.
    """
    finished = [same for same in precisions if same.runs]
    real = [s for s in finished if s is baseline or not s.runs[0].is_only_fp32]
    pairs = itertools.combinations(real, 2)
    return [(other, base) for base, other in pairs if not base.precision.autocasts]


def _countable(sources: Sequence[Search]) -> tuple[list[Run], list[str]]:
    """The runs that count, and a sentence for each run or precision that does not.

    A run does not count if it was stopped, still runs, or changed at a resume.
    """
    runs = []
    left_out = []
    for run in (run for source in sources for run in source.runs):
        if not run.settings:
            left_out.append(f"{run.name}: {run.state.value}: {run.reason}")
            continue
        if PRECISION not in run.settings:
            raise UserError(
                f"{run.name}: {PRECISION}: missing; allowed: a trial with "
                "hyperparameters.amp, which names its precision"
            )
        changes = "; ".join(run.changes)
        if run.state in HAVE_ENDED and not changes:
            runs.append(run)
        else:
            left_out.append(f"{run.short_name}: {changes or run.reason}")
    left_out += [reason for source in sources for reason in source.left_out]
    return runs, left_out


def _finished(runs: Runs) -> list[Run]:
    return [run for run in runs if run.state is RunState.COMPLETED]


def _smaller_is_better(run: Run, metric: str) -> bool:
    """Whether less is better: the searcher says so for its own metric, and the name
    tells it for other metrics.
    """
    if metric == run.settings[METRIC]:
        return bool(run.settings[SMALLER_IS_BETTER])
    is_accuracy = "accuracy" in metric
    if not is_accuracy and "loss" not in metric:
        raise UserError(
            f"--metric: whether a larger or a smaller {metric} is better is unknown; "
            "allowed: the searcher.metric of the runs, or one whose name has accuracy "
            "or loss in it"
        )
    return not is_accuracy


def _margin(base: PrecisionRuns) -> float:
    if "accuracy" in base.metric:
        in_percent = max(base.values) > 1.0
        return 100 * _ACCURACY_MARGIN if in_percent else _ACCURACY_MARGIN
    return _RELATIVE_MARGIN * abs(mean(base.values))


def _judged_by(run: Run, metric: str) -> Run:
    """The run, marked as failed if its last value of the metric is not finite."""
    value = run.metrics.get(metric, 0.0)
    if run.state is not RunState.COMPLETED or math.isfinite(value):
        return run
    return replace(run, state=RunState.FAILED, reason=f"{metric} is {value} at the end")


def _check_comparable(runs: Runs, metric: str) -> None:
    """Check that finished and failed runs can be compared.

    Raises:
        UserError: if runs differ in settings or machine facts that must be equal (the
            message names them all), if two finished runs have the same precision and
            seed, or if a finished run lacks the metric.
    """
    finished = _finished(runs)
    # A failed run may have ended before its log named its machine.
    by_machine = differences(finished, lambda run: run.machine.facts)
    problems = [*differences(runs, _fixed), *by_machine, *_duplicates(finished)]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise UserError(
            f"these runs cannot be compared: {counted(len(problems), 'problem')}\n"
            f"{listed}\nallowed: runs that differ in precision, scaler settings, seed "
            "and name only"
        )
    if any(metric not in run.metrics for run in finished):
        raise UserError(
            f"--metric: {metric} is not in the last validation of every finished run; "
            f"allowed: {', '.join(sorted(finished[0].metrics))}"
        )


def _baseline(
    precisions: Sequence[PrecisionRuns], left_out: Sequence[str]
) -> PrecisionRuns:
    """The runs in fp32 if one of them has finished, else the runs in tf32.

    Raises:
        UserError: if neither precision has a finished run.
    """
    finished = [same for same in precisions if same.runs]
    if finished and not finished[0].precision.autocasts:
        return finished[0]
    ends = dict.fromkeys(run.reason for same in precisions for run in same.failed)
    missing = "there is no baseline" if finished else "no finished run can be compared"
    raise UserError(
        f"{'; '.join([missing, *ends, *left_out])}; allowed: a finished run in fp32 or "
        "tf32: give more sources, or train it with `det-amp compare "
        "CONFIG`"
    )


def differences(runs: Runs, facts_of: Callable[[Run], Config]) -> Sentences:
    """A sentence for each fact in which runs differ. It names every value, and the
    first run with each value.
    """
    facts = [facts_of(run) for run in runs]
    for name in sorted(set().union(*facts)):
        first: Values = {}
        for run, known in zip(runs, facts, strict=True):
            value = str(shown_setting(name, known.get(name, "not set")))
            first.setdefault(value, run.short_name)
        if len(first) > 1:
            values = "; ".join(f"{value} in {one}" for value, one in first.items())
            yield f"{name}: {values}"


def _duplicates(finished: Runs) -> Sentences:
    first: Values = {}
    for run in finished:
        if run.seed is None:
            continue
        twice = f"{run.precision.value} has finished twice with seed {run.seed}"
        if twice in first:
            yield f"{twice}: {first[twice]}, {run.name}; give one of them"
        first[twice] = run.name
