"""The report that compares precisions: the answer, sentences, a table, the picture, and
JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import SCALER_KEYS, Precision, yaml_lines
from determined_amp.report import Sentences
from determined_amp.report.compared_runs import ComparedRuns, compare_runs, differences
from determined_amp.report.page import Table, Written, write_page
from determined_amp.report.precision_comparison import (
    Comparison,
    Effect,
    Equivalence,
    PrecisionRuns,
    Ratio,
)
from determined_amp.report.precision_figure import draw_comparison
from determined_amp.report.recommendation import (
    RULE,
    Recommendation,
    in_words,
    more_seeds,
    recommend,
)
from determined_amp.runs.run import AMP, TRIAL, Run, Spread
from determined_amp.search.search_folder import Search

# AMP does not speed up a loop that spends a larger share of its time waiting for data.
WAITS_FOR_DATA = 0.2

# Attributes of a run that the JSON has under the same name.
_FACTS = (
    "name",
    "precision",
    "seed",
    "state",
    "reason",
    "machine",
    "date",
    "metrics",
    "training_seconds",
    "shares_device",
)

# Numbers of the last training report, by their name in the JSON.
_LAST = {
    "peak_memory_mib": MetricName.PEAK_MEMORY_MIB,
    "peak_reserved_memory_mib": MetricName.PEAK_RESERVED_MEMORY_MIB,
    "loss_scale_log2": MetricName.LOSS_SCALE_LOG2,
    "applied_steps": MetricName.APPLIED_STEPS,
    "skipped_steps": MetricName.SKIPPED_STEPS,
}

_CAPTION = (
    "Dots are runs, columns their median. Two precisions are equal if the whole "
    "interval is inside the green band. A dot without an interval has one seed."
)

_UNKNOWN = Equivalence.UNKNOWN.value


@dataclass(frozen=True)
class PrecisionReport:
    """A report that was written, and what it says."""

    written: Written
    compared: ComparedRuns
    recommended: Recommendation


def write_precision_report(
    sources: Sequence[Search],
    folder: Path,
    metric: str | None = None,
    margin: float | None = None,
) -> PrecisionReport:
    """Write the report on some runs into a folder; for `metric` and `margin` see
    `compare_runs`.

    Raises:
        ReportError: if the runs cannot be compared, or the report cannot be written.
    """
    compared = compare_runs(sources, metric, margin)
    recommended = recommend(compared)
    record = {
        "use": recommended.precision,
        "why": recommended.why,
        **vars(compared),
        "precisions": [_precision_record(same) for same in compared.precisions],
        "runs": [_run_record(run, compared.metric) for run in compared.runs],
    }
    written = write_page(
        folder,
        "precision",
        answer=recommended.answer,
        yaml=yaml_of(compared, recommended),
        sentences=list(precision_sentences(compared)),
        figure=draw_comparison(compared),
        caption=_CAPTION,
        table=precision_table(compared),
        origin=_method(compared),
        record=record,
    )
    return PrecisionReport(written, compared, recommended)


def _precision_record(same: PrecisionRuns) -> Values:
    """The numbers of a precision for the JSON, which lists its runs apart."""
    return {
        "precision": same.precision,
        "runs": len(same.runs),
        "failed": len(same.failed),
        "mean": same.mean,
        "std": same.std,
        "samples_per_second": same.speed,
        "peak_memory_mib": same.last(MetricName.PEAK_MEMORY_MIB),
        "data_wait_share": same.data_wait_share,
    }


def _run_record(run: Run, metric: str) -> Values:
    """The numbers of a run for the JSON."""
    record = {name: getattr(run, name) for name in _FACTS}
    record["data_wait_share"] = run.reports.data_wait_share
    record["audit_share"] = run.reports.audit_share
    record |= {name: run.last(number) for name, number in _LAST.items()}
    record["scaler"] = _scaler(run)
    record["batches"] = run.trained_batches
    record["curve"] = run.curve(metric)
    record["samples_per_second"] = run.speed
    return record


def _scaler(run: Run) -> Values:
    return {key: run.settings.get(f"{AMP}.{key}") for key in SCALER_KEYS}


def yaml_of(compared: ComparedRuns, recommended: Recommendation) -> str:
    """Lines to paste into an experiment YAML."""
    changes: Values = {"precision": recommended.precision.value}
    islands = compared.settings.get(f"{AMP}.fp32_modules")
    if recommended.precision.autocasts and islands:
        changes["fp32_modules"] = list(islands)
    if recommended.precision is Precision.AMP_FP16:
        run = next(
            run for run in compared.runs if run.precision is recommended.precision
        )
        changes["init_scale"] = run.settings[f"{AMP}.init_scale"]
    return yaml_lines(changes)


def precision_sentences(compared: ComparedRuns) -> Sentences:
    """All sentences besides the answer, the comparisons first."""
    told = [
        _compared(comparison, compared.metric) for comparison in compared.comparisons
    ]
    yield from told
    if any(_UNKNOWN in sentence for sentence in told):
        yield f"where this cannot tell yet, {more_seeds(compared.comparisons)}"
    yield from compared.notes
    yield from _waiting(compared)
    yield from _failed(compared)
    if compared.left_out:
        yield f"left out: {'; '.join(compared.left_out)}"
    yield from _audited(compared)
    yield from _mixed(compared)
    yield from _caveats(compared)
    seeds = "; ".join(
        f"{same.name}: {same.seeds_in_words}" for same in compared.precisions
    )
    yield f"measured on {compared.setting}; {seeds}"
    yield (
        "this says nothing about accuracy after more batches, other sizes or other"
        " devices"
    )


def _compared(comparison: Comparison, metric: str) -> str:
    speed = comparison.speed
    memory = comparison.memory
    parts = ["speed not measured"]
    if speed is not None:
        is_slower = speed.effect is Effect.SMALLER
        inverse = f" ({1 / speed.median:.1f} times the time)" if is_slower else ""
        parts = [f"speed {_ratio(speed, 'faster', 'slower')}{inverse}"]
    if memory is not None:
        parts.append(f"memory {_ratio(memory, 'more', 'less')}")
    difference = comparison.difference
    interval = ""
    if difference.std:
        ends = f"{difference.low:+.2g} to {difference.high:+.2g}"
        interval = f" (95 % interval {ends}, paired by seed)"
    parts.append(f"{metric} {difference.mean:+.2g}{interval}: {_verdict(comparison)}")
    return (
        f"{comparison.precision.value} against {comparison.against.value}:"
        f" {'; '.join(parts)}"
    )


def _ratio(ratio: Ratio, larger: str, smaller: str) -> str:
    effect = ratio.effect.value.format(larger=larger, smaller=smaller)
    return f"{in_words(ratio)}: {effect}"


def _verdict(comparison: Comparison) -> str:
    verdict = comparison.verdict
    difference = comparison.difference
    if verdict is Equivalence.EQUAL:
        return f"{verdict.value} of {comparison.margin:.2g}"
    if verdict is Equivalence.DIFFERENT:
        return f"{verdict.value}, {'better' if comparison.is_better else 'worse'}"
    unknown = f"{verdict.value} with {difference.seeds}"
    # as with a single seed, or a metric of few validation samples
    if not difference.std:
        return f"{unknown}, without a spread between seeds"
    return f"{unknown} (margin {comparison.margin:.2g})"


def _waiting(compared: ComparedRuns) -> Sentences:
    waiting = []
    for same in compared.precisions:
        share = same.data_wait_share
        if share is not None and share > WAITS_FOR_DATA:
            waiting.append(f"{same.name} {share:.0%}")
    if waiting:
        yield (
            f"the loop waits for data more than {WAITS_FOR_DATA:.0%} of the time "
            f"({', '.join(waiting)}): AMP may not help there, more workers of the data "
            "loader may"
        )


def _failed(compared: ComparedRuns) -> Sentences:
    for same in compared.precisions:
        if same.failed:
            failed = [
                f"{run.seed_name} ({run.name}): {run.reason}" for run in same.failed
            ]
            rest = (
                "; its numbers are those of the runs that finished" if same.runs else ""
            )
            of = len(failed) + len(same.runs)
            yield (
                f"{same.name}: {len(failed)} of {of} runs failed:"
                f" {'; '.join(failed)}{rest}"
            )


def _audited(compared: ComparedRuns) -> Sentences:
    unaudited = [
        run.short_name for run in compared.completed if run.reports.audit_share is None
    ]
    shares = {same.name: same.audit_share for same in compared.precisions if same.runs}
    if unaudited:
        yield (
            "not audited, so whether the precision was on is unknown:"
            f" {', '.join(unaudited)}"
        )
    elif set(shares.values()) == {1.0}:
        yield (
            "audit: every finished run computed all products in the precision that it"
            " asks for"
        )
    for name, share in shares.items():
        if share is not None and share < 1.0:
            yield (
                f"audit: {name} computed at least {_share(share)} of the FLOPs of the "
                "first batch in the precision that it asks for, the rest in another"
            )


def _share(share: float) -> str:
    """A share in percent; only the whole is rounded to 100 %."""
    return f"{share if share == 1.0 else min(share, 0.999):.1%}"


def _mixed(compared: ComparedRuns) -> Sentences:
    """Allowed differences between runs, other than the precision."""
    scaled = [run for run in compared.runs if run.precision is Precision.AMP_FP16]
    by_scaler = differences(scaled, _scaler)
    by_version = differences(compared.completed, lambda run: run.machine.versions)
    for difference in (*by_scaler, *by_version):
        yield f"the runs differ in {difference}"


def _caveats(compared: ComparedRuns) -> Sentences:
    if any(run.is_only_fp32 for run in compared.completed):
        yield (
            "tf32 is fp32 on this device, which has no TF32: it is shown, and not"
            " compared"
        )
    if any(run.shares_device for run in compared.runs):
        yield (
            "several trials ran at the same time: their speeds are left out; compare "
            "speeds with one worker"
        )
    if not compared.machine.on_gpu:
        yield (
            "on a CPU speed drifts from run to run, with heat and load: trust only "
            "ratios far outside the range of the runs. The memory is that of the whole "
            "process, libraries included"
        )


def precision_table(compared: ComparedRuns) -> Table:
    """A row per precision."""
    return [list(_cells(same, compared)) for same in compared.precisions]


def _cells(same: PrecisionRuns, compared: ComparedRuns) -> Iterator[tuple[str, str]]:
    """The heads and cells of a precision."""
    yield "precision", same.name
    failed = f", {len(same.failed)} failed" if same.failed else ""
    yield "runs", f"{len(same.runs)}{failed}"
    mean = "" if same.mean is None else f"{same.mean:.4g}"
    std = "" if same.std is None else f" ± {same.std:.2g}"
    yield compared.metric, f"{mean}{std}"
    yield "samples/s", spread_text(same.speed)
    yield "speed", compared.speed_label(same.precision, "1")
    memory = "allocated" if compared.machine.on_gpu else "resident, not judged"
    yield f"peak MiB, {memory}", spread_text(same.last(MetricName.PEAK_MEMORY_MIB))
    yield "applied steps", spread_text(same.last(MetricName.APPLIED_STEPS))
    yield "skipped", spread_text(same.last(MetricName.SKIPPED_STEPS))
    yield "loss scale", _scale(same)
    waits = same.data_wait_share
    yield "waits for data", "" if waits is None else f"{waits:.0%}"
    share = same.audit_share
    yield "audit", "" if share is None else _share(share)
    yield "training s", spread_text(same.spread(lambda run: run.training_seconds))


def _scale(same: PrecisionRuns) -> str:
    """The loss scale at the end; only float16 has one."""
    scale = same.last(MetricName.LOSS_SCALE_LOG2)
    if scale is None or same.precision is not Precision.AMP_FP16:
        return "none" if same.runs else ""
    ends = dict.fromkeys((scale.low, scale.high))
    return " to ".join(f"2^{end:g}" for end in ends)


def spread_text(spread: Spread | None) -> str:
    """The median, and the range if its ends still differ after rounding."""
    if spread is None:
        return ""
    median, low, high = map(_short, (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _method(compared: ComparedRuns) -> str:
    """The trial, how the answer was found, and the versions."""
    versions = compared.machine.versions.items()
    known = ", ".join(f"{name} {value}" for name, value in versions if value)
    return (
        f"Precisions: {compared.settings[TRIAL]}. Speed is that of the steady reports: "
        f"the first report of every process is left out. The rule: {RULE}. Versions: "
        f"{known}."
    )
