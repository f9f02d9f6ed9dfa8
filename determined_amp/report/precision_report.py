"""The report on precisions: speed, memory, accuracy and safety, as picture, page, text and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_amp.amp.metrics import MetricName
from determined_amp.report import page
from determined_amp.report import precision_text as text
from determined_amp.report.precision_comparison import Comparison, Summary
from determined_amp.report.precision_figure import draw
from determined_amp.report.precision_findings import RULE, Advice, Findings, advise, claims, find
from determined_amp.report.source import Source
from determined_amp.report.sources import drawn_with
from determined_amp.runs.run import Run
from determined_amp.runs.settings import TRIAL

_CAPTION = (
    "One colour per precision. Thin lines and dots are runs, thick lines their mean, columns their "
    "median. Two precisions are equal if the whole interval is inside the green band. A hollow dot "
    "has one seed and no interval."
)

_METHOD = (
    "Speed is that of the steady reports: the first report of every process is left out.",
    f"The precision to use is {RULE}.",
)


@dataclasses.dataclass(frozen=True)
class Written:
    """A report that was written.

    Args:
        short: The answer, the lines to paste and the sentences that bear on them.
        markdown: The whole report in Markdown.
        files: The PNG, HTML, Markdown and JSON files.
    """

    short: str
    markdown: str
    files: tuple[Path, ...]


def write_report(
    sources: Sequence[Source],
    folder: Path,
    metric: str | None = None,
    margin: float | None = None,
    *,
    smaller_is_better: bool | None = None,
) -> Written:
    """Write the report on some runs.

    Args:
        sources: The runs.
        folder: The output folder.
        metric: See `find`.
        margin: See `find`.
        smaller_is_better: See `find`.

    Raises:
        ReportError: if the runs cannot be compared.
    """
    findings = find(sources, metric, margin, smaller_is_better=smaller_is_better)
    advice, drawn = advise(findings), drawn_with()
    title = f"Precisions: {findings.runs[0].settings[TRIAL]}"
    figure = draw(findings)
    page.save_png(figure, folder / "precision.png")
    html = _page(title, page.as_svg(figure), findings, advice, drawn)
    (folder / "precision.html").write_text(html, encoding="utf-8")
    markdown = text.markdown(title, findings, advice)
    (folder / "precision.md").write_text(markdown, encoding="utf-8")
    told = [text.answer(advice), *text.sentences(findings)]
    found = {"drawn": drawn, "sentences": told, **numbers(findings, advice)}
    (folder / "precision.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    files = tuple(folder / f"precision.{kind}" for kind in ("png", "html", "md", "json"))
    return Written(text.short_answer(findings, advice), markdown, files)


def _page(
    title: str, svg: str, findings: Findings, advice: Advice, drawn: Mapping[str, str]
) -> str:
    claimed = text.claims_table(findings)
    heads = ["run", "precision", "seed", "state", "reason"]
    runs = [
        [run.name, run.precision.value, str(run.seed), run.state.value, run.reason]
        for run in findings.runs
    ]
    measured = {"on": text.setting(findings), **findings.machine.versions}
    parts = [
        page.verdict(text.answer(advice), text.lines_to_paste(findings, advice)),
        page.bullets(text.sentences(findings)),
        page.table("Claims", *claimed, folded=False) if claimed[1] else "",
        page.picture(svg, _CAPTION),
        page.table("By precision", *text.table(findings), folded=False),
        page.table(f"Runs: {len(runs)}", heads, runs),
        page.bullets(_METHOD),
        page.footer({"measured": measured, "drawn": drawn}),
    ]
    return page.document(title, parts)


def numbers(findings: Findings, advice: Advice) -> dict[str, Any]:
    """All numbers for JSON; null means not measured or not finite."""
    machine = findings.machine
    found: dict[str, Any] = _finite(
        {
            "device": machine.device,
            "torch": machine.torch,
            "versions": machine.versions,
            "dates": findings.dates,
            "metric": findings.metric,
            "smaller_is_better": findings.smaller_is_better,
            "margin": findings.margin,
            "baseline": findings.baseline.value,
            "use": advice.precision.value,
            "why": advice.why,
            "precisions": [_of_summary(summary) for summary in findings.summaries],
            "comparisons": [_of_comparison(comparison) for comparison in findings.comparisons],
            "runs": [_of_run(run, findings) for run in findings.runs],
            "left_out": findings.left_out,
        }
    )
    return found


def _of_run(run: Run, findings: Findings) -> dict[str, Any]:
    curve = run.curve(findings.metric)
    best = min if findings.smaller_is_better else max
    return {
        "name": run.name,
        "precision": run.precision.value,
        "seed": run.seed,
        "state": run.state.value,
        "reason": run.reason,
        "device": run.machine.device,
        "torch": run.machine.torch,
        "versions": run.machine.versions,
        "date": run.date,
        "final": run.metrics.get(findings.metric),
        "best": best((value for _, value in curve), default=None),
        "curve": curve,
        "samples_per_second": _plain(run.speed),
        "training_seconds": run.training_seconds,
        "peak_memory_mib": run.last(MetricName.PEAK_MEMORY_MIB),
        "peak_reserved_memory_mib": run.last(MetricName.PEAK_RESERVED_MEMORY_MIB),
        "applied_steps": run.last(MetricName.APPLIED_STEPS),
        "skipped_steps": run.last(MetricName.SKIPPED_STEPS),
        "loss_scale_log2": run.last(MetricName.LOSS_SCALE_LOG2),
        "data_wait_share": run.reports.data_wait_share,
        "audit_share": run.reports.audit_share,
    }


def _of_summary(summary: Summary) -> dict[str, Any]:
    return {
        "precision": summary.name,
        "n": len(summary.runs),
        "failed": len(summary.failed),
        "seeds": summary.seeds,
        "mean": summary.mean,
        "std": summary.std,
        "samples_per_second": _plain(summary.speed),
        "peak_memory_mib": _plain(summary.memory),
        "peak_reserved_memory_mib": _plain(summary.reserved_memory),
        "data_wait_share": summary.data_wait_share,
    }


def _of_comparison(comparison: Comparison) -> dict[str, Any]:
    found = comparison.difference
    return {
        "precision": comparison.ours.name,
        "against": comparison.base.name,
        "speed": _plain(comparison.speed),
        "memory": _plain(comparison.memory),
        "difference": {**dataclasses.asdict(found), "low": found.low, "high": found.high},
        "verdict": comparison.verdict.value,
        "seeds_needed": found.seeds_needed(comparison.margin),
        "claims": [
            {"claim": c.text, "judgement": c.judgement.value, "measured": c.measured}
            for c in (claims(comparison) if comparison.ours.precision.autocast_dtype else ())
        ],
    }


def _plain(found: Any) -> dict[str, Any] | None:
    return None if found is None else dataclasses.asdict(found)


def _finite(value: Any) -> Any:
    """Replace infinity and NaN with None: JSON has no numbers for them."""
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
