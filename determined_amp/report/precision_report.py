"""Writes the report that compares precisions in speed, memory, accuracy and safety."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import SCALER_KEYS
from determined_amp.report import page
from determined_amp.report import precision_text as text
from determined_amp.report.precision_comparison import Summary
from determined_amp.report.precision_figure import draw
from determined_amp.report.precision_findings import Advice, Findings, advise, find
from determined_amp.runs.run import AMP, TRIAL, Run
from determined_amp.search.search_folder import Search

NAME = "precision"

# What the JSON has of a run under the same name.
_FACTS = (
    *("name", "precision", "seed", "state", "reason", "machine", "date", "metrics"),
    *("training_seconds", "shares_device"),
)


@dataclass(frozen=True)
class Written:
    """A report that was written."""

    short: str  # the answer, the lines to paste and the sentences that bear on them
    markdown: str  # the whole report in Markdown
    files: Sequence[Path]  # the PNG, HTML, Markdown and JSON files
    findings: Findings  # the comparison
    advice: Advice  # the precision to use


def write_report(sources: Sequence[Search], folder: Path, **options: Any) -> Written:
    """Write the report on some runs.

    Args:
        sources: The runs.
        folder: The output folder.
        options: See `find`.

    Raises:
        ReportError: if the runs cannot be compared, or the report cannot be written.
    """
    findings = find(sources, **options)
    advice = advise(findings)
    title = f"Precisions: {findings.settings[TRIAL]}"
    markdown = text.markdown(title, findings, advice)
    record = {
        "answer": text.answer(advice),
        "use": advice.precision,
        "why": advice.why,
        "sentences": text.sentences(findings),
        **{name: value for name, value in vars(findings).items() if name != "summaries"},
        "precisions": [_summary(summary) for summary in findings.summaries],
        "runs": [_run(run, findings.metric) for run in findings.runs],
    }
    files = page.write(folder, NAME, markdown, draw(findings), record)
    return Written(text.short_answer(findings, advice), markdown, files, findings, advice)


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
        "applied_steps": run.last(MetricName.APPLIED_STEPS),
        "skipped_steps": run.last(MetricName.SKIPPED_STEPS),
        "loss_scale_log2": run.last(MetricName.LOSS_SCALE_LOG2),
        "data_wait_share": run.reports.data_wait_share,
        "audit_share": run.reports.audit_share,
    }
