"""The report that compares precisions: the answer, sentences, a table, the picture, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import SCALER_KEYS, Precision, yaml_lines
from determined_amp.report.compared_runs import ComparedRuns, compare_runs
from determined_amp.report.page import markdown_table, write_page
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

NAME = "precision"

# AMP does not speed up a loop that spends a larger share of its time waiting for data.
WAITS_FOR_DATA = 0.2

# Attributes of a run that the JSON has under the same name, and those of its reports.
_FACTS = (
    *("name", "precision", "seed", "state", "reason", "machine", "date", "metrics"),
    *("training_seconds", "shares_device"),
)
_OF_REPORTS = ("data_wait_share", "audit_share")

# Numbers of the last training report, by their name in the JSON.
_LAST = {
    "peak_memory_mib": MetricName.PEAK_MEMORY_MIB,
    "peak_reserved_memory_mib": MetricName.PEAK_RESERVED_MEMORY_MIB,
    "loss_scale_log2": MetricName.LOSS_SCALE_LOG2,
}
_OF_OPTIMIZERS = {
    "applied_steps": MetricName.APPLIED_STEPS,
    "skipped_steps": MetricName.SKIPPED_STEPS,
}

_CAPTION = (
    "Dots are runs, columns their median. Two precisions are equal if the whole interval is inside "
    "the green band. A hollow dot has one seed and no interval."
)

_METHOD = "Speed is that of the steady reports: the first report of every process is left out."

_OF_SPEED = {
    Effect.LARGER: "faster",
    Effect.SMALLER: "slower",
    Effect.NOT_LARGER: "not faster",
    Effect.UNKNOWN: "cannot tell yet",
}
_OF_MEMORY = {
    Effect.LARGER: "more",
    Effect.SMALLER: "less",
    Effect.NOT_LARGER: "not more",
    Effect.UNKNOWN: "cannot tell yet",
}


@dataclass(frozen=True)
class PrecisionReport:
    """A report that was written."""

    text: str  # the answer, the lines to paste, and all sentences
    files: Sequence[Path]  # the PNG, Markdown and JSON files
    compared: ComparedRuns
    recommended: Recommendation


def write_precision_report(
    sources: Sequence[Search], folder: Path, **options: Any
) -> PrecisionReport:
    """Write the report on some runs into a folder, with the options of `compare_runs`.

    Raises:
        ReportError: if the runs cannot be compared, or the report cannot be written.
    """
    compared = compare_runs(sources, **options)
    recommended = recommend(compared)
    sentences = list(precision_sentences(compared))
    items = "\n".join(f"* {sentence}" for sentence in sentences)
    paste = yaml_of(compared, recommended)
    text = f"{recommended.answer}\n\n{paste}\n\n{items}"
    markdown = "\n\n".join(
        [
            f"# {recommended.answer}",
            f"```yaml\n{paste}\n```",
            items,
            f"![{_CAPTION}]({NAME}.png)",
            markdown_table(*precision_table(compared)),
            _method(compared),
        ]
    )
    record = {
        "answer": recommended.answer,
        "use": recommended.precision,
        "why": recommended.why,
        "sentences": sentences,
        **vars(compared),
        "precisions": [_precision_record(same) for same in compared.precisions],
        "runs": [_run_record(run, compared.metric) for run in compared.runs],
    }
    files = write_page(folder, NAME, f"{markdown}\n", draw_comparison(compared), record)
    return PrecisionReport(text, files, compared, recommended)


def _precision_record(same: PrecisionRuns) -> dict[str, Any]:
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


def _run_record(run: Run, metric: str) -> dict[str, Any]:
    """The numbers of a run for the JSON."""
    record = {name: getattr(run, name) for name in _FACTS}
    record |= {name: getattr(run.reports, name) for name in _OF_REPORTS}
    record |= {name: run.last(number) for name, number in _LAST.items()}
    record |= {name: run.of_optimizers(number) for name, number in _OF_OPTIMIZERS.items()}
    record["scaler"] = {key: run.settings.get(f"{AMP}.{key}") for key in SCALER_KEYS}
    record["batches"] = run.trained_batches
    record["curve"] = run.curve(metric)
    record["samples_per_second"] = run.speed
    return record


def yaml_of(compared: ComparedRuns, recommended: Recommendation) -> str:
    """Lines to paste into an experiment YAML."""
    changes: dict[str, Any] = {"precision": recommended.precision.value}
    islands = compared.settings.get(f"{AMP}.fp32_modules")
    if recommended.precision.autocasts and islands:
        changes["fp32_modules"] = list(islands)
    if recommended.precision is Precision.AMP_FP16:
        run = next(run for run in compared.runs if run.precision is recommended.precision)
        changes["init_scale"] = run.settings[f"{AMP}.init_scale"]
    return yaml_lines(changes)


def precision_sentences(compared: ComparedRuns) -> Iterator[str]:
    """All sentences besides the answer, the comparisons first."""
    for comparison in compared.comparisons:
        yield _compared(comparison, compared.metric)
    if any(_is_open(comparison) for comparison in compared.comparisons):
        yield f"where this cannot tell yet, {more_seeds(compared.comparisons)}"
    yield from compared.notes
    yield from _waiting(compared)
    yield from _failed(compared)
    if compared.left_out:
        yield f"left out: {'; '.join(compared.left_out)}"
    yield from _audited(compared)
    yield from _mixed(compared)
    yield from _caveats(compared)
    seeds = "; ".join(f"{same.name}: {same.seeds_in_words}" for same in compared.precisions)
    yield f"measured on {compared.setting}; {seeds}"
    yield "this says nothing about accuracy after more batches, other sizes or other devices"


def _compared(comparison: Comparison, metric: str) -> str:
    parts = [_speed(comparison.speed)]
    if comparison.memory is not None:
        memory = comparison.memory
        parts.append(f"memory {in_words(memory)}: {_OF_MEMORY[memory.effect]}")
    parts.append(_metric(comparison, metric))
    return f"{comparison.precision.value} against {comparison.against.value}: {'; '.join(parts)}"


def _speed(ratio: Ratio | None) -> str:
    if ratio is None:
        return "speed not measured"
    is_slower = ratio.effect is Effect.SMALLER
    inverse = f" ({1 / ratio.median:.1f} times the time)" if is_slower else ""
    return f"speed {in_words(ratio)}: {_OF_SPEED[ratio.effect]}{inverse}"


def _metric(comparison: Comparison, metric: str) -> str:
    difference, verdict = comparison.difference, comparison.verdict
    interval = ""
    if difference.std:
        ends = f"{difference.low:+.2g} to {difference.high:+.2g}"
        interval = f" (95 % interval {ends}, paired by seed)"
    judged = verdict.value
    if verdict is Equivalence.EQUAL:
        judged += f" of {comparison.margin:.2g}"
    elif verdict is Equivalence.DIFFERENT:
        judged += ", better" if comparison.is_better else ", worse"
    elif difference.std is None:
        judged += " with 1 seed, which does not show how much seeds differ"
    elif difference.std == 0.0:  # as with a metric of few validation samples
        judged += f" with {difference.pairs} seeds, between which the difference has no spread"
    else:
        judged += f" with {difference.pairs} seeds (margin {comparison.margin:.2g})"
    return f"{metric} {difference.mean:+.2g}{interval}: {judged}"


def _is_open(comparison: Comparison) -> bool:
    """Whether the speed or the metric cannot be told yet."""
    speed = comparison.speed
    return comparison.verdict is Equivalence.UNKNOWN or (
        speed is not None and speed.effect is Effect.UNKNOWN
    )


def _waiting(compared: ComparedRuns) -> Iterator[str]:
    waiting = [s for s in compared.precisions if (s.data_wait_share or 0.0) > WAITS_FOR_DATA]
    if waiting:
        shares = ", ".join(f"{same.name} {same.data_wait_share:.0%}" for same in waiting)
        yield (
            f"the loop waits for data more than {WAITS_FOR_DATA:.0%} of the time ({shares}): AMP "
            "may not help there, more workers of the data loader may"
        )


def _failed(compared: ComparedRuns) -> Iterator[str]:
    for same in compared.precisions:
        if same.failed:
            of = len(same.failed) + len(same.runs)
            why = "; ".join(f"{run.seed_name} ({run.name}): {run.reason}" for run in same.failed)
            rest = "; its numbers are those of the runs that finished" if same.runs else ""
            yield f"{same.name}: {len(same.failed)} of {of} runs failed: {why}{rest}"


def _audited(compared: ComparedRuns) -> Iterator[str]:
    if all(run.reports.audit_share == 1.0 for run in compared.completed):
        yield "audit: every finished run computed all products in the precision that it asks for"
        return
    unaudited: list[str] = []
    alike: dict[tuple[str, str], list[str]] = {}
    for run in compared.completed:
        share = run.reports.audit_share
        if share is None:
            unaudited.append(run.short_name)
        elif share < 1.0:
            alike.setdefault((run.precision.value, _share(share)), []).append(run.seed_name)
    for (precision, part), seeds in alike.items():
        yield (
            f"audit: {precision} ({', '.join(seeds)}) computed {part} of the FLOPs of the first "
            "batch in the precision that it asks for, the rest in another"
        )
    if unaudited:
        yield f"not audited, so whether the precision was on is unknown: {', '.join(unaudited)}"


def _share(share: float) -> str:
    """A share in percent; only the whole is rounded to 100 %."""
    return f"{share if share == 1.0 else min(share, 0.999):.1%}"


def _mixed(compared: ComparedRuns) -> Iterator[str]:
    """Allowed differences between runs, other than the precision."""
    scaled = [run for run in compared.runs if run.precision is Precision.AMP_FP16]
    for key in SCALER_KEYS:
        values = [str(run.settings.get(f"{AMP}.{key}")) for run in scaled]
        if len(set(values)) > 1:
            listed = ", ".join(dict.fromkeys(values))
            yield f"the runs in {Precision.AMP_FP16.value} differ in {key}: {listed}"
    for name in compared.machine.versions:
        values = [str(run.machine.versions.get(name)) for run in compared.runs]
        if len(set(values)) > 1:
            yield f"the runs differ in {name}: {', '.join(dict.fromkeys(values))}"


def _caveats(compared: ComparedRuns) -> Iterator[str]:
    if any(same.is_only_fp32 for same in compared.precisions):
        yield "tf32 is fp32 on this device, which has no TF32: it is shown, and not compared"
    if any(run.shares_device for run in compared.runs):
        yield (
            "several trials ran at the same time: their speeds are left out; compare speeds with "
            "one worker"
        )
    if not compared.machine.on_gpu:
        yield (
            "on a CPU speed drifts from run to run, with heat and load: trust only ratios far "
            "outside the range of the runs. The memory is that of the whole process, libraries "
            "included"
        )


def precision_table(compared: ComparedRuns) -> tuple[list[str], list[list[str]]]:
    """Heads and rows, a row per precision."""
    memory = "allocated" if compared.machine.on_gpu else "resident, not judged"
    heads = ["precision", "runs", compared.metric, "samples/s", "speed", f"peak MiB, {memory}"]
    heads += ["applied steps", "skipped", "loss scale", "waits for data", "audit", "training s"]
    speeds = {c.precision: c.speed for c in compared.with_baseline}
    rows = []
    for same in compared.precisions:
        ratio = speeds.get(same.precision)
        times = f"{ratio.median:.2f}x" if ratio else ""
        rows.append(_row(same, "1" if same.precision is compared.baseline else times))
    return heads, rows


def _row(same: PrecisionRuns, times: str) -> list[str]:
    """The cells of a precision, which is `times` as fast as the baseline."""
    failed = f", {len(same.failed)} failed" if same.failed else ""
    mean = "" if same.mean is None else f"{same.mean:.4g}"
    std = "" if same.std is None else f" ± {same.std:.2g}"
    memory = same.last(MetricName.PEAK_MEMORY_MIB)
    applied = same.of_optimizers(MetricName.APPLIED_STEPS)
    skipped = same.of_optimizers(MetricName.SKIPPED_STEPS)
    wait = same.data_wait_share
    waits = "" if wait is None else f"{wait:.0%}"
    audit = same.spread(lambda run: run.reports.audit_share)
    share = "" if audit is None else _share(audit.low)
    seconds = same.spread(lambda run: run.training_seconds)
    row = [same.name, f"{len(same.runs)}{failed}", f"{mean}{std}", spread_text(same.speed), times]
    row += [spread_text(memory), spread_text(applied), spread_text(skipped)]
    return [*row, _scale(same), waits, share, spread_text(seconds)]


def _scale(same: PrecisionRuns) -> str:
    """The loss scale at the end; only float16 has one."""
    scale = same.last(MetricName.LOSS_SCALE_LOG2)
    if scale is None or same.precision is not Precision.AMP_FP16:
        return "none" if same.runs else ""
    return " to ".join(f"2^{end:g}" for end in dict.fromkeys((scale.low, scale.high)))


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
    known = {name: value for name, value in compared.machine.versions.items() if value}
    versions = ", ".join(f"{name} {value}" for name, value in known.items())
    return (
        f"Precisions: {compared.settings[TRIAL]}. {_METHOD} The rule: {RULE}. Versions: {versions}."
    )
