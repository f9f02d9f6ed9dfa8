"""The report that compares precisions: the answer, sentences, tables, the picture, and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import SCALER_KEYS, Precision, yaml_lines
from determined_amp.report import page
from determined_amp.report.precision_comparison import (
    WAITS_FOR_DATA,
    Claim,
    Comparison,
    Equivalence,
    Interval,
    Ratio,
    Summary,
)
from determined_amp.report.precision_figure import draw
from determined_amp.report.precision_findings import RULE, Advice, Findings, advise, find
from determined_amp.runs.run import AMP, TRIAL, Run, Spread
from determined_amp.search.search_folder import Search

NAME = "precision"

# Attributes of a run that the JSON has under the same name.
_FACTS = (
    *("name", "precision", "seed", "state", "reason", "machine", "date", "metrics"),
    *("training_seconds", "shares_device"),
)

_CAPTION = (
    "One colour per precision. Thin lines and dots are runs, thick lines their mean, columns their "
    "median. Two precisions are equal if the whole interval is inside the green band. A hollow dot "
    "has one seed and no interval."
)

_METHOD = "Speed is that of the steady reports: the first report of every process is left out."


@dataclass(frozen=True)
class Written:
    """A report that was written."""

    short: str  # the answer, the lines to paste and the sentences that bear on them
    markdown: str  # the whole report in Markdown
    files: Sequence[Path]  # the PNG, HTML, Markdown and JSON files
    findings: Findings  # the comparison
    advice: Advice  # the precision to use


def write_report(sources: Sequence[Search], folder: Path, **options: Any) -> Written:
    """Write the report on some runs into a folder, with the options of `find`.

    Raises:
        ReportError: if the runs cannot be compared, or the report cannot be written.
    """
    findings = find(sources, **options)
    advice = advise(findings)
    text = markdown(findings, advice)
    record = {
        "answer": answer(advice),
        "use": advice.precision,
        "why": advice.why,
        "sentences": sentences(findings),
        **{name: value for name, value in vars(findings).items() if name != "summaries"},
        "precisions": [_summary(summary) for summary in findings.summaries],
        "runs": [_run(run, findings.metric) for run in findings.runs],
    }
    files = page.write(folder, NAME, text, draw(findings), record)
    return Written(short_answer(findings, advice), text, files, findings, advice)


def _summary(summary: Summary) -> dict[str, Any]:
    """The numbers of a precision for the JSON, which lists its runs apart."""
    return {
        "precision": summary.precision,
        "runs": len(summary.runs),
        "failed": len(summary.failed),
        "mean": summary.mean,
        "std": summary.std,
        "samples_per_second": summary.speed,
        "peak_memory_mib": summary.last(MetricName.PEAK_MEMORY_MIB),
        "data_wait_share": summary.data_wait_share,
    }


def _run(run: Run, metric: str) -> dict[str, Any]:
    """The numbers of a run for the JSON."""
    return {
        **{name: getattr(run, name) for name in _FACTS},
        "scaler": {key: run.settings.get(f"{AMP}.{key}") for key in SCALER_KEYS},
        "batches": run.trained_batches,
        "curve": run.curve(metric),
        "samples_per_second": run.speed,
        "peak_memory_mib": run.last(MetricName.PEAK_MEMORY_MIB),
        "peak_reserved_memory_mib": run.last(MetricName.PEAK_RESERVED_MEMORY_MIB),
        "applied_steps": run.of_optimizers(MetricName.APPLIED_STEPS),
        "skipped_steps": run.of_optimizers(MetricName.SKIPPED_STEPS),
        "loss_scale_log2": run.last(MetricName.LOSS_SCALE_LOG2),
        "data_wait_share": run.reports.data_wait_share,
        "audit_share": run.reports.audit_share,
    }


def answer(advice: Advice) -> str:
    """The sentence that names the precision to use, and the reason."""
    return f"use {advice.precision.value} here: {advice.why}"


def lines_to_paste(findings: Findings, advice: Advice) -> str:
    """Lines to paste into an experiment YAML."""
    changes: dict[str, Any] = {"precision": advice.precision.value}
    if advice.precision.autocasts and findings.settings.get(f"{AMP}.fp32_modules"):
        changes["fp32_modules"] = list(findings.settings[f"{AMP}.fp32_modules"])
    if advice.precision is Precision.AMP_FP16:
        run = next(run for run in findings.runs if run.precision is advice.precision)
        changes["init_scale"] = run.settings[f"{AMP}.init_scale"]
    return yaml_lines(changes)


def sentences(findings: Findings) -> list[str]:
    """All sentences besides the answer, the comparisons first."""
    return [
        *(f"{_title(c)}: {_compared(c, findings.metric)}" for c in findings.comparisons),
        *findings.notes,
        *_waiting(findings),
        *_left_out(findings),
        *_audited(findings),
        *_mixed(findings),
        *_notes(findings),
        f"measured on {findings.setting}; "
        + "; ".join(f"{s.name}: {s.seeds_in_words}" for s in findings.summaries),
        "this says nothing about accuracy after more batches, other sizes or other devices",
    ]


def short_answer(findings: Findings, advice: Advice) -> str:
    """The text for a terminal or a log: the answer, lines to paste, and what bears on them.

    The tables, the setting of the measurement and its general limits are in the report's files.
    """
    lines = [
        *(f"{_title(c)}: {_compared(c, findings.metric)}" for c in findings.with_baseline),
        *findings.notes,
        *_waiting(findings),
        *_left_out(findings),
        *(_audited(findings) if not _all_in_precision(findings) else ()),
    ]
    items = "\n".join(f"- {sentence}" for sentence in lines)
    return "\n\n".join([answer(advice), lines_to_paste(findings, advice), items])


def claims_table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Heads and rows, a row per claim; no rows if no claim was judged."""
    judged = [c for c in findings.with_baseline if c.claims]
    rows = [
        [same[0].text, *map(_judged, same)]
        for same in zip(*(c.claims for c in judged), strict=True)
    ]
    return ["claim for ResNet-50", *map(_title, judged)], rows


def _judged(claim: Claim) -> str:
    if claim.measured is None or math.isinf(claim.measured[0]):
        return claim.judgement.value
    low, high = claim.measured
    return f"{claim.judgement.value} ({low:.3g} to {high:.3g})"


def table(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """Heads and rows, a row per precision."""
    rows = [_row(summary, findings) for summary in findings.summaries]
    return [head for head, _ in rows[0]], [[cell for _, cell in row] for row in rows]


def _row(summary: Summary, findings: Findings) -> list[tuple[str, str]]:
    """The cells of a precision, each after the head of its column; a metric may be `precision`."""
    whose = "allocated; reserved" if findings.machine.on_gpu else "resident, not judged"
    speeds = {c.precision: c.speed for c in findings.with_baseline}
    ratio = speeds.get(summary.precision)
    is_baseline = summary.precision is findings.baseline
    times = "1" if is_baseline else f"{ratio.median:.2f}x" if ratio else ""
    failed = f", {len(summary.failed)} failed" if summary.failed else ""
    mean = "" if summary.mean is None else f"{summary.mean:.4g}"
    wait, shares = summary.data_wait_share, summary.spread(lambda run: run.reports.audit_share)
    applied, skipped = MetricName.APPLIED_STEPS, MetricName.SKIPPED_STEPS
    memory = spread_text(summary.last(MetricName.PEAK_MEMORY_MIB))
    reserved = summary.last(MetricName.PEAK_RESERVED_MEMORY_MIB)
    return [
        ("precision", summary.name),
        ("runs", f"{len(summary.runs)}{failed}"),
        (findings.metric, mean + ("" if summary.std is None else f" ± {summary.std:.2g}")),
        ("samples/s", spread_text(summary.speed)),
        ("speed", times),
        (
            f"peak MiB, {whose}",
            memory if reserved is None else f"{memory}; {spread_text(reserved)}",
        ),
        ("applied steps", spread_text(summary.spread(lambda run: run.of_optimizers(applied)))),
        ("skipped", spread_text(summary.spread(lambda run: run.of_optimizers(skipped)))),
        ("loss scale", _scale(summary)),
        ("waits for data", "" if wait is None else f"{wait:.0%}"),
        ("audit", "" if shares is None else _share(shares.low)),
        ("training s", spread_text(summary.spread(lambda run: run.training_seconds))),
    ]


def markdown(findings: Findings, advice: Advice) -> str:
    """The report as Markdown: the answer first, then sentences, the picture and tables."""
    items = "\n".join(f"* {sentence}" for sentence in sentences(findings))
    heads = ["run", "precision", "seed", "state", "reason"]
    rows = [
        [r.name, r.precision.value, str(r.seed), r.state.value, r.reason] for r in findings.runs
    ]
    known = ((name, value) for name, value in findings.machine.versions.items() if value)
    versions = ", ".join(f"{name} {value}" for name, value in known)
    parts = [
        f"# {answer(advice)}",
        f"```yaml\n{lines_to_paste(findings, advice)}\n```",
        items,
        f"![{_CAPTION}](precision.png)",
        page.table(*claims_table(findings)),
        page.table(*table(findings)),
        page.table(heads, rows),
        f"Precisions: {findings.settings[TRIAL]}. {_METHOD} The rule: {RULE}. "
        f"Versions: {versions}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _left_out(findings: Findings) -> Iterator[str]:
    for summary in findings.summaries:
        failed, count = summary.failed, len(summary.failed) + len(summary.runs)
        if failed:
            why = "; ".join(f"{run.seed_name} ({run.name}): {run.reason}" for run in failed)
            yield f"{summary.name}: {len(failed)} of {count} runs failed: {why}" + (
                "; its numbers are those of the runs that finished" if summary.runs else ""
            )
    if findings.left_out:
        yield f"left out: {'; '.join(findings.left_out)}"


def _audited(findings: Findings) -> Iterator[str]:
    if _all_in_precision(findings):
        yield "audit: every finished run computed all products in the precision that it asks for"
        return
    unaudited: list[str] = []
    alike: dict[tuple[Precision, str], list[Run]] = {}
    for run in (run for summary in findings.summaries for run in summary.runs):
        share = run.reports.audit_share
        if share is None:
            unaudited.append(run.short_name)
        elif share < 1.0:
            alike.setdefault((run.precision, _share(share)), []).append(run)
    for (precision, shown), runs in alike.items():
        several = f"{precision.value} ({', '.join(run.seed_name for run in runs)})"
        yield (
            f"audit: {runs[0].short_name if len(runs) == 1 else several} computed {shown} of the "
            "FLOPs of the first batch in the precision that it asks for, the rest in another"
        )
    if unaudited:
        yield f"not audited, so whether the precision was on is unknown: {', '.join(unaudited)}"


def _all_in_precision(findings: Findings) -> bool:
    finished = (run for summary in findings.summaries for run in summary.runs)
    return all(run.reports.audit_share == 1.0 for run in finished)


def _share(share: float) -> str:
    """A share in percent; only the whole is rounded to 100 %."""
    return f"{share if share == 1.0 else min(share, 0.999):.1%}"


def _mixed(findings: Findings) -> Iterator[str]:
    """Allowed differences between runs, other than the precision."""
    for summary in findings.summaries:
        runs = (*summary.runs, *summary.failed)
        for key in SCALER_KEYS if summary.precision is Precision.AMP_FP16 else ():
            values = dict.fromkeys(str(run.settings.get(f"{AMP}.{key}")) for run in runs)
            if len(values) > 1:
                yield f"the runs in {summary.name} differ in {key}: {', '.join(values)}"
    for name in findings.machine.versions:
        values = dict.fromkeys(str(run.machine.versions.get(name)) for run in findings.runs)
        if len(values) > 1:
            yield f"the runs differ in {name}: {', '.join(values)}"


def _notes(findings: Findings) -> Iterator[str]:
    if any(summary.is_only_fp32 for summary in findings.summaries):
        drift = findings.drift
        yield "tf32 is fp32 on this device, which has no TF32: it is shown, and not compared" + (
            "" if drift is None else f"; that its speed is {_times(drift)} is drift of the machine"
        )
    if any(run.shares_device for run in findings.runs):
        yield (
            "several trials ran at the same time: their speeds are left out; compare speeds with "
            "one worker"
        )
    if not findings.machine.on_gpu:
        yield (
            "on a CPU speed drifts from run to run, with heat and load: trust only ratios far "
            "outside the range of the runs. The memory is that of the whole process, libraries "
            "included"
        )


def _title(comparison: Comparison) -> str:
    return f"{comparison.precision.value} against {comparison.against.value}"


def _compared(comparison: Comparison, metric: str) -> str:
    parts = [_speed(comparison.speed)]
    if comparison.memory is not None:
        ratio = comparison.memory
        parts.append(f"memory {_times(ratio)}: {_size(ratio, 'more', 'less', 'as much')}")
    return "; ".join([*parts, _metric(comparison, metric)])


def _speed(ratio: Ratio | None) -> str:
    if ratio is None:
        return "speed not measured"
    word = _size(ratio, "faster", "slower", "no difference beyond the spread")
    inverse = f" ({1 / ratio.median:.1f} times the time)" if ratio.is_smaller else ""
    return f"speed {_times(ratio)}: {word}{inverse}"


def _size(ratio: Ratio, larger: str, smaller: str, same: str) -> str:
    if ratio.is_larger:
        return larger
    return smaller if ratio.is_smaller else same


def _times(ratio: Ratio) -> str:
    of = f"over {ratio.pairs} pairs of {'equal seed' if ratio.by_seed else 'runs'}"
    if ratio.pairs == 1 and ratio.low == ratio.high:  # such as memory, with one value per run
        return f"{ratio.median:.2f}x (in one pair of runs)"
    if ratio.pairs == 1:
        of = "over the reports of one pair of runs"
    return f"{ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f} {of})"


def _metric(comparison: Comparison, metric: str) -> str:
    difference, verdict = comparison.difference, comparison.verdict
    direction = "better" if comparison.is_better else "worse"
    judged = {
        Equivalence.EQUAL: f"{verdict.value} of {comparison.margin:.2g}",
        Equivalence.DIFFERENT: f"{verdict.value}, {direction}",
        Equivalence.UNKNOWN: _inconclusive(difference, comparison.margin),
    }[verdict]
    interval = ""
    if difference.std and difference.half_width is not None:
        kind = "paired by seed" if difference.paired else "seeds differ"
        interval = f" (95 % interval {difference.low:+.2g} to {difference.high:+.2g}, {kind})"
    return f"{metric} {difference.mean:+.2g}{interval}: {judged}"


def _inconclusive(interval: Interval, margin: float) -> str:
    text = f"inconclusive with {interval.seeds} seed{'s' * (interval.seeds != 1)}"
    if interval.std is None:
        return f"{text}; at least 2 are needed to see how much seeds differ"
    if interval.std == 0.0:  # as with a metric of few validation samples
        return f"{text}; the difference is the same for all, which leaves no spread to judge by"
    needed = interval.seeds_needed(margin)
    many = "more than 1000" if needed is None else f"about {needed}"
    return f"{text}; {many} should suffice at this variance (margin {margin:.2g})"


def _waiting(findings: Findings) -> Iterator[str]:
    waiting = [s for s in findings.summaries if (s.data_wait_share or 0.0) > WAITS_FOR_DATA]
    if waiting:
        shares = ", ".join(f"{s.name} {s.data_wait_share:.0%}" for s in waiting)
        yield (
            f"the loop waits for data more than {WAITS_FOR_DATA:.0%} of the time ({shares}): AMP "
            "may not help there, more data.workers may"
        )


def _scale(summary: Summary) -> str:
    """The loss scale at the end; only float16 has one."""
    scale = summary.last(MetricName.LOSS_SCALE_LOG2)
    if scale is None or summary.precision is not Precision.AMP_FP16:
        return "none" if summary.runs else ""
    return " to ".join(f"2^{end:g}" for end in dict.fromkeys((scale.low, scale.high)))


def spread_text(spread: Spread | None) -> str:
    """The median, and the range if its ends still differ after rounding."""
    if spread is None:
        return ""
    median, low, high = (
        f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        for value in (spread.median, spread.low, spread.high)
    )
    return median if low == high else f"{median} ({low} to {high})"
