"""Writes the report that compares precisions in speed, memory, accuracy and safety."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.report import page
from determined_amp.report import precision_text as text
from determined_amp.report.precision_comparison import Summary
from determined_amp.report.precision_figure import draw
from determined_amp.report.precision_findings import advise, find
from determined_amp.report.source import Source
from determined_amp.runs.settings import TRIAL

NAME = "precision"


@dataclass(frozen=True)
class Written:
    """A report that was written.

    Args:
        short: The answer, the lines to paste and the sentences that bear on them.
        markdown: The whole report in Markdown.
        files: The PNG, HTML, Markdown and JSON files.
    """

    short: str
    markdown: str
    files: Sequence[Path]


def write_report(sources: Sequence[Source], folder: Path, **options: Any) -> Written:
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
        "runs": findings.runs,
    }
    files = page.write(folder, NAME, markdown, draw(findings), record)
    return Written(text.short_answer(findings, advice), markdown, files)


def _summary(summary: Summary) -> dict[str, Any]:
    """A summary with the number of its runs instead of the runs, which the JSON lists apart."""
    return {**vars(summary), "runs": len(summary.runs), "failed": len(summary.failed)}
