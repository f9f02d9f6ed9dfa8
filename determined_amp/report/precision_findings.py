"""The findings of a comparison: whether runs can be compared, the numbers, claims and advice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from determined_amp.amp.settings import SCALER_KEYS, Precision
from determined_amp.experiment.machine import Machine
from determined_amp.report import ReportError
from determined_amp.report.precision_comparison import (
    MIN_EFFECT,
    Comparison,
    Equivalence,
    Ratio,
    Summary,
    comparisons,
    speed_ratio,
    summaries,
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
    TRIAL,
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

# The trials of this repository, which the claims of the literature are judged on unasked.
_OWN_TRIALS = ("trials.resnet50:", "trials.latte:", "trials.mlp:")

RULE = (
    "the fastest of those that are not worse, lost no run and are faster than the baseline in "
    f"every pair of runs, beyond chance, and by {MIN_EFFECT - 1:.0%} or more; else the baseline"
)


@dataclass(frozen=True)
class Findings:
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
    summaries: Sequence[Summary]  # a summary per precision, in the order of `Precision`
    comparisons: Sequence[Comparison]  # comparisons, those with the baseline first
    left_out: Sequence[str]  # a sentence for each run that does not count
    notes: Sequence[str] = ()  # further sentences from the sources

    @property
    def runs(self) -> list[Run]:
        """The completed and the failed runs."""
        return [run for summary in self.summaries for run in (*summary.runs, *summary.failed)]

    @property
    def drift(self) -> Ratio | None:
        """The drift of the machine: the speed of tf32 over fp32 on a device without TF32."""
        base = [s for s in self.summaries if s.precision is Precision.FP32 and s.runs]
        same = [s for s in self.summaries if s.is_only_fp32 and s.runs]
        return speed_ratio(same[0], base[0]) if base and same else None

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


def find(
    sources: Sequence[Search],
    metric: str | None = None,
    margin: float | None = None,
    *,
    smaller_is_better: bool | None = None,
    judge_claims: bool = False,
) -> Findings:
    """Compare all runs of some sources.

    Args:
        sources: The sources.
        metric: Validation metric; by default the accuracy if all report it, else the searcher's.
        margin: Difference of the metric that does not matter; by default 0.003 for an accuracy (0.3
            if it is in percent), and 1 % of the baseline's mean for another metric.
        smaller_is_better: Direction of the metric; by default the searcher's for its own metric,
            else the direction that the name implies.
        judge_claims: Whether to judge the claims of the literature on any trial; they are judged on
            the trials of this repository in any case.

    Raises:
        ReportError: if the runs cannot be compared, or do not report the metric.
    """
    runs, left_out = _countable(sources)
    _check_comparable(runs)
    metric = _metric(_finished(runs), metric)
    runs = [_judged_by(run, metric) for run in runs]
    _check_comparable(runs)
    first = _finished(runs)[0]
    by_precision, base = summaries(runs, metric), _baseline(runs)
    if smaller_is_better is None:
        smaller_is_better = _smaller_is_better(first, metric)
    margin = _margin(by_precision, base, metric) if margin is None else margin
    days = sorted({run.date[:10] for run in runs if run.date})
    return Findings(
        metric=metric,
        smaller_is_better=smaller_is_better,
        margin=margin,
        baseline=base,
        settings={n: value for n, value in first.settings.items() if n not in _MAY_DIFFER},
        machine=first.machine,
        dates=list(dict.fromkeys(days[:1] + days[-1:])),
        summaries=by_precision,
        comparisons=comparisons(
            by_precision,
            base,
            smaller_is_better=smaller_is_better,
            margin=margin,
            judge_claims=judge_claims or str(first.settings[TRIAL]).startswith(_OWN_TRIALS),
        ),
        left_out=left_out,
        notes=list(dict.fromkeys(note for source in sources for note in source.notes)),
    )


def _countable(sources: Sequence[Search]) -> tuple[list[Run], list[str]]:
    """The runs that count for their precision, and a sentence for each other run.

    A run that was stopped, still runs, or changed at a resume does not count.
    """
    runs: list[Run] = []
    left_out: list[str] = []
    everything = [run for source in sources for run in source.runs]
    for run in (run for run in everything if run.settings):
        if PRECISION not in run.settings:
            raise ReportError(
                f"{run.name}: {PRECISION}: missing; allowed: a trial with hyperparameters.amp, "
                "which names its precision"
            )
        changes = [
            f"{name} changed at a resume: "
            + ", ".join(f"{value} from batch {first}" for first, value in parts)
            for name, parts in run.changed.items()
        ]
        if changes or not (run.state is RunState.COMPLETED or run.state.is_failure):
            left_out.append(f"{run.short_name}: {'; '.join(changes) or run.reason}")
        else:
            runs.append(run)
    left_out += [f"{r.name}: {r.state.value}: {r.reason}" for r in everything if not r.settings]
    left_out += [reason for source in sources for reason in source.left_out]
    if not runs:
        others = "; left out: " + "; ".join(left_out) if left_out else ""
        raise ReportError(f"no run has finished{others}; allowed: finished runs of two precisions")
    return runs, left_out


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


def _margin(by_precision: Sequence[Summary], base: Precision, metric: str) -> float:
    (mean,) = (summary.mean for summary in by_precision if summary.precision is base)
    assert mean is not None  # every finished run has the metric
    if _is_accuracy(metric):
        values = (run.metrics[metric] for summary in by_precision for run in summary.runs)
        in_percent = max(values) > 1.0
        return _ACCURACY_MARGIN * (100 if in_percent else 1)
    return _RELATIVE_MARGIN * abs(mean)


def _check_comparable(runs: Sequence[Run]) -> None:
    """Check that finished and failed runs can be compared.

    Raises:
        ReportError: if the runs differ in settings, devices or versions that must be the same (the
            message names them all), or if there are fewer than two precisions, no finished
            baseline, or two finished runs with the same precision and seed.
    """
    problems = [*_differences(runs), *_duplicates(runs)]
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


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    """A sentence per setting, device or version in which the runs differ."""
    keys = sorted({key for run in runs for key in run.settings} - _MAY_DIFFER)
    facts = {key: [(run, run.settings.get(key, "not set")) for run in runs] for key in keys}
    # A failed run may have ended before its log named its machine.
    finished = _finished(runs)
    facts |= {n: [(run, getattr(run.machine, n)) for run in finished] for n in OF_A_MACHINE}
    for what, of_runs in facts.items():
        by_value: dict[str, list[str]] = {}
        for run, value in of_runs:
            by_value.setdefault(str(value), []).append(run.short_name)
        if len(by_value) > 1:
            parts = (f"{value} in {_some(names)}" for value, names in by_value.items())
            yield f"{what}: {'; '.join(parts)}"


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED_RUNS
    return ", ".join(names[:_NAMED_RUNS]) + (f" and {rest} more" if rest > 0 else "")


def _duplicates(runs: Sequence[Run]) -> Iterator[str]:
    by_seed: dict[tuple[Precision, int], list[str]] = {}
    for run in _finished(runs):
        if run.seed is not None:
            by_seed.setdefault((run.precision, run.seed), []).append(run.name)
    for (precision, seed), names in by_seed.items():
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


@dataclass(frozen=True)
class Advice:
    """The precision to use."""

    precision: Precision  # the precision to use
    why: str  # the reason, in words


def advise(findings: Findings) -> Advice:
    """Apply `RULE`; `Comparison.is_not_worse` says what "not worse" means."""
    good = [c for c in findings.with_baseline if c.is_not_worse and not c.lost_runs]
    faster = [(c.speed.median, c) for c in good if c.speed and c.speed.is_larger]
    if not faster:
        reasons = [f"{s.name} has no finished run" for s in findings.summaries if not s.runs]
        reasons += [
            f"{c.precision.value} {_fault(c, findings.metric)}" for c in findings.with_baseline
        ]
        return Advice(findings.baseline, "; ".join(reasons))
    times, best = max(faster, key=lambda pair: pair[0])
    metric, why = findings.metric, f"it is {times:.2f} times as fast as {best.against.value}"
    if best.verdict is Equivalence.UNKNOWN:
        seeds = best.difference.seeds
        why += (
            f", but whether its {metric} is the same cannot be told with {seeds} "
            f"seed{'s' * (seeds != 1)}: train more before you rely on it"
        )
    elif best.verdict is Equivalence.EQUAL:
        why += f" with equal {metric}"
    else:
        why += f" with better {metric}"
    return Advice(best.precision, why)


def _fault(comparison: Comparison, metric: str) -> str:
    """The strongest reason against a precision: what is certain comes before what may be chance."""
    if comparison.lost_runs:
        return "lost a run"
    if comparison.verdict is Equivalence.DIFFERENT and not comparison.is_not_worse:
        return f"has a worse {metric}"
    if comparison.speed is not None and comparison.speed.is_smaller:
        return f"is slower ({comparison.speed.median:.2f} times the speed)"
    if not comparison.is_not_worse:
        seeds = comparison.difference.seeds
        return (
            f"has a worse mean {metric}, and {seeds} seed{'s' * (seeds != 1)} cannot "
            "tell whether that is chance"
        )
    if comparison.speed is None:
        return "has no measured speed"
    return "is not faster by more than the spread of the runs"
