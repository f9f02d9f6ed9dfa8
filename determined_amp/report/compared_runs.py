"""The runs that a report on precisions compares: which count, and whether they can be compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_amp.amp.settings import SCALER_KEYS, Precision
from determined_amp.experiment.machine import Machine
from determined_amp.report import ReportError
from determined_amp.report.precision_comparison import (
    Comparison,
    PrecisionRuns,
    by_precision,
    compare_precisions,
)
from determined_amp.runs.run import (
    ACCURACY,
    AMP,
    BATCH_SIZE,
    METRIC,
    OF_A_MACHINE,
    PRECISION,
    SEED,
    SMALLER_IS_BETTER,
    Run,
    RunState,
)
from determined_amp.search.search_folder import Search

_ACCURACY_MARGIN = 0.003
_RELATIVE_MARGIN = 0.01

# Settings in which compared runs may differ. Names and search method do not affect the training.
_MAY_DIFFER = frozenset(
    {"name", "searcher.name", SEED, PRECISION, *(f"{AMP}.{key}" for key in SCALER_KEYS)}
)
_NAMED_RUNS = 2


@dataclass(frozen=True)
class ComparedRuns:
    """The comparison of some runs, in plain values."""

    metric: str  # the compared metric
    smaller_is_better: bool  # direction of the metric
    margin: float  # difference of the metric that does not matter
    baseline: Precision  # the precision that the others are compared with
    # The settings that all compared runs have in common, by dotted name.
    settings: Mapping[str, Any]
    machine: Machine  # the machine of all completed runs
    # The first and the last day on which a run began, or one day; empty if unknown.
    dates: Sequence[str]
    precisions: Sequence[PrecisionRuns]  # the runs per precision, in the order of `Precision`
    comparisons: Sequence[Comparison]  # comparisons, those with the baseline first
    left_out: Sequence[str]  # a sentence for each run that does not count
    notes: Sequence[str] = ()  # further sentences from the sources

    @property
    def completed(self) -> list[Run]:
        return [run for same in self.precisions for run in same.runs]

    @property
    def runs(self) -> list[Run]:
        """The completed and the failed runs."""
        return [run for same in self.precisions for run in (*same.runs, *same.failed)]

    @property
    def setting(self) -> str:
        """Device, versions, length and date of all runs, in one line."""
        dates = " to ".join(self.dates) or "date unknown"
        batches = max(run.trained_batches for run in self.runs)
        size, machine = self.settings[BATCH_SIZE], self.machine
        return f"{machine.device}, torch {machine.torch}, {batches} batches of {size}, {dates}"

    @property
    def with_baseline(self) -> list[Comparison]:
        return [c for c in self.comparisons if c.against is self.baseline]


def compare_runs(
    sources: Sequence[Search],
    metric: str | None = None,
    margin: float | None = None,
    *,
    smaller_is_better: bool | None = None,
) -> ComparedRuns:
    """Compare all runs of some sources.

    Args:
        sources: The sources.
        metric: Validation metric; by default the accuracy if all report it, else the searcher's.
        margin: Difference of the metric that does not matter; by default 0.003 for an accuracy (0.3
            if it is in percent), and 1 % of the baseline's mean for another metric.
        smaller_is_better: Direction of the metric; by default the searcher's for its own metric,
            else the direction that the name implies.

    Raises:
        ReportError: if the runs cannot be compared, or do not report the metric.
    """
    runs, left_out = _countable(sources)
    _check_comparable(runs)
    metric = _metric(_finished(runs), metric)
    runs = [_judged_by(run, metric) for run in runs]
    _check_comparable(runs)  # one of them may have failed by its metric
    if smaller_is_better is None:
        smaller_is_better = _smaller_is_better(_finished(runs)[0], metric)
    precisions, baseline = by_precision(runs, metric), _baseline(runs)
    if margin is None:
        margin = _margin(precisions, baseline)
    comparisons = [
        compare_precisions(*pair, smaller_is_better=smaller_is_better, margin=margin)
        for pair in _to_compare(precisions, baseline)
    ]
    return ComparedRuns(
        metric=metric,
        smaller_is_better=smaller_is_better,
        margin=margin,
        baseline=baseline,
        precisions=precisions,
        comparisons=comparisons,
        left_out=left_out,
        notes=list(dict.fromkeys(note for source in sources for note in source.notes)),
        **_in_common(runs),
    )


def _in_common(runs: Sequence[Run]) -> dict[str, Any]:
    """The fields of `ComparedRuns` that the runs have in common."""
    first = _finished(runs)[0]
    days = sorted({run.date[:10] for run in runs if run.date})
    return {
        "settings": {n: value for n, value in first.settings.items() if n not in _MAY_DIFFER},
        "machine": first.machine,
        "dates": list(dict.fromkeys(days[:1] + days[-1:])),
    }


def _to_compare(
    precisions: Sequence[PrecisionRuns], baseline: Precision
) -> list[tuple[PrecisionRuns, PrecisionRuns]]:
    """Every precision with the baseline, and AMP also with `tf32` on devices with TF32."""
    completed = {same.precision: same for same in precisions if same.runs}
    real = {p: same for p, same in completed.items() if not same.is_only_fp32}
    pairs = [(same, completed[baseline]) for p, same in real.items() if p is not baseline]
    # Where the device has TF32, many programs without AMP run in it.
    if baseline is Precision.FP32 and Precision.TF32 in real:
        pairs += [(same, real[Precision.TF32]) for p, same in real.items() if p.autocasts]
    return pairs


def _countable(sources: Sequence[Search]) -> tuple[list[Run], list[str]]:
    """The runs that count for their precision, and a sentence for each other run.

    A run that was stopped, still runs, or changed at a resume does not count.
    """
    runs: list[Run] = []
    left_out: list[str] = []
    for run in (run for source in sources for run in source.runs):
        if not run.settings:
            left_out.append(f"{run.name}: {run.state.value}: {run.reason}")
            continue
        if PRECISION not in run.settings:
            raise ReportError(
                f"{run.name}: {PRECISION}: missing; allowed: a trial with hyperparameters.amp, "
                "which names its precision"
            )
        changes = "; ".join(_changes(run))
        if changes or not (run.state is RunState.COMPLETED or run.state.is_failure):
            left_out.append(f"{run.short_name}: {changes or run.reason}")
        else:
            runs.append(run)
    left_out += [reason for source in sources for reason in source.left_out]
    if not runs:
        others = "; left out: " + "; ".join(left_out) if left_out else ""
        raise ReportError(f"no run has finished{others}; allowed: finished runs of two precisions")
    return runs, left_out


def _changes(run: Run) -> Iterator[str]:
    for name, parts in run.changed.items():
        values = ", ".join(f"{value} from batch {first}" for first, value in parts)
        yield f"{name} changed at a resume: {values}"


def _finished(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.state is RunState.COMPLETED]


def _judged_by(run: Run, metric: str) -> Run:
    """A run that is a failure, too, if its last value of the compared metric is not finite."""
    value = run.metrics.get(metric, 0.0)
    if run.state is not RunState.COMPLETED or math.isfinite(value):
        return run
    return replace(run, state=RunState.FAILED, reason=f"{metric} is {value} at the end")


def _metric(finished: Sequence[Run], wanted: str | None) -> str:
    reported = [set(run.metrics) for run in finished]
    common = set.intersection(*reported) - {"epochs"}
    chosen = wanted or (ACCURACY if ACCURACY in common else str(finished[0].settings[METRIC]))
    if chosen not in common:
        raise ReportError(
            f"--metric: {chosen} is not in the last validation of every finished run; allowed: "
            f"{', '.join(sorted(common)) or 'nothing, they have no metric in common'}"
        )
    return chosen


def _smaller_is_better(run: Run, metric: str) -> bool:
    """The searcher's direction for its own metric; for others, the one that the name implies."""
    if metric == run.settings[METRIC]:
        return bool(run.settings[SMALLER_IS_BETTER])
    if not _is_accuracy(metric) and "loss" not in metric:
        raise ReportError(
            f"--metric: whether a larger or a smaller {metric} is better is unknown; allowed: "
            "--better larger or --better smaller with it"
        )
    return not _is_accuracy(metric)


def _is_accuracy(metric: str) -> bool:
    """Whether a metric is an accuracy, by its name."""
    return "accuracy" in metric


def _margin(precisions: Sequence[PrecisionRuns], baseline: Precision) -> float:
    if _is_accuracy(precisions[0].metric):
        in_percent = any(max(same.values, default=0.0) > 1.0 for same in precisions)
        return _ACCURACY_MARGIN * (100 if in_percent else 1)
    (mean,) = (same.mean for same in precisions if same.precision is baseline)
    assert mean is not None  # every finished run has the metric
    return _RELATIVE_MARGIN * abs(mean)


def _check_comparable(runs: Sequence[Run]) -> None:
    """Check that finished and failed runs can be compared.

    Raises:
        ReportError: if the runs differ in settings, devices or versions that must be the same (the
            message names them all), or if there are fewer than two precisions, no finished
            baseline, or two finished runs with the same precision and seed.
    """
    problems = [*_unequal(runs), *_duplicates(runs)]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ReportError(
            f"these runs cannot be compared: {len(problems)} problem{'s' * (len(problems) > 1)}\n"
            f"{listed}\nallowed: runs that differ in precision, scaler settings, seed and name only"
        )
    for problem in _missing(runs):
        raise ReportError(
            f"{problem}; allowed: at least two precisions, and of fp32 or tf32 a finished run: "
            "give more sources, or train them with `python -m determined_amp compare CONFIG`"
        )


def _baseline(runs: Sequence[Run]) -> Precision:
    """The precision to compare with: fp32 if an fp32 run has finished, else tf32."""
    finished = {run.precision for run in _finished(runs)}
    return Precision.FP32 if Precision.FP32 in finished else Precision.TF32


def _unequal(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence per setting, device or version in which the runs differ."""
    keys = sorted({key for run in runs for key in run.settings} - _MAY_DIFFER)
    facts = {key: [(run, run.settings.get(key, "not set")) for run in runs] for key in keys}
    # A failed run may have ended before its log named its machine.
    finished = _finished(runs)
    facts |= {n: [(run, getattr(run.machine, n)) for run in finished] for n in OF_A_MACHINE}
    for what, of_runs in facts.items():
        names: dict[str, list[str]] = {}
        for run, value in of_runs:
            names.setdefault(str(value), []).append(run.short_name)
        if len(names) > 1:
            yield f"{what}: " + "; ".join(f"{value} in {_some(names[value])}" for value in names)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_RUNS
    return ", ".join(names[:_NAMED_RUNS]) + (f" and {rest} more" if rest > 0 else "")


def _duplicates(runs: Sequence[Run]) -> Iterator[str]:
    same: dict[tuple[Precision, int], list[str]] = {}
    for run in _finished(runs):
        if run.seed is not None:
            same.setdefault((run.precision, run.seed), []).append(run.name)
    for (precision, seed), names in same.items():
        if len(names) > 1:
            yield (
                f"{precision.value} has finished {len(names)} times with seed {seed}: "
                f"{', '.join(names)}; give one of them"
            )


def _missing(runs: Sequence[Run]) -> Iterator[str]:
    finished = _finished(runs)
    if not finished:
        yield f"no run has finished: {'; '.join(dict.fromkeys(run.reason for run in runs))}"
    if len({Precision.FP32 if run.is_only_fp32 else run.precision for run in runs}) < 2:
        names = sorted({run.precision.value for run in runs})
        same = ", which is fp32 on this device," if any(run.is_only_fp32 for run in runs) else ""
        yield f"all runs are {' and '.join(names)}{same} and there is nothing to compare"
    if _baseline(runs) not in {run.precision for run in finished}:
        yield "there is no baseline"
