"""The report on a loss-scale search: the finder's prediction and the results of the trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_amp.amp.metrics import MetricName
from determined_amp.experiment.errors import UserError, one_line
from determined_amp.finder.advice import FoundScale, lines_to_paste
from determined_amp.finder.advice import sentences as finder_sentences
from determined_amp.finder.passes import Observation
from determined_amp.finder.verdict import Finding
from determined_amp.report import page
from determined_amp.report.loss_scale_figure import draw
from determined_amp.report.loss_scale_panels import power
from determined_amp.report.loss_scale_text import over_loss_scale, predict, sentences
from determined_amp.report.master_runs import read_finding
from determined_amp.report.source import Source
from determined_amp.report.sources import (
    drawn_with,
    folder_beside,
    is_experiment,
    read_source,
    refuse_precisions,
)
from determined_amp.runs.run import Machine

# Columns of the trial table, after the searcher's metric.
_METRICS = (
    *("steps_lost", "flushed_share", "overflow", "backward_headroom_bits", "gradient_error"),
    "validation_accuracy",
)

_CAPTION = (
    "Lines are predicted from one bfloat16 backward per batch, dots are measured in float16. "
    "Green: the safe window: nothing overflows, and no gradient loses more than 0.1 % of its norm, "
    "flushed to 0. Red: a gradient overflows, the step is skipped, the scale halved. "
    "Amber band: mean and standard deviation over seeds, inside the window. Hollow: stopped early."
)


def write_report(
    given: str, folder: Path | None = None, finding: str | None = None
) -> tuple[list[str], tuple[Path, Path]]:
    """Write the report on a search.

    Args:
        given: The source of the search, as it was typed.
        folder: The output folder; None: beside the source.
        finding: The finder's JSON file, or its experiment; None: the finder runs here.

    Returns:
        The sentences of the report, and its PNG and HTML files.

    Raises:
        UserError: if the report cannot be made.
    """
    found = _finding(finding) if finding else None
    search_source = read_source(given)
    refuse_precisions(given, search_source)
    search = over_loss_scale(search_source)
    missing: list[str] = []
    if found is None:
        found, missing = _predicted(search)
    folder = folder or folder_beside(given)
    figure = draw(found, search)
    picture, html = folder / "loss_scale.png", folder / "loss_scale.html"
    page.save_png(figure, picture)
    told = [*_answer(found), *sentences(found, search), *missing]
    if is_experiment(given) and found and not finding:
        told.append(
            f"predicted here, on {found.run.device} with torch {found.run.torch}, which the "
            "cluster need not have: det experiment create hp_search/find_loss_scale.yaml . "
            "predicts there, for --finding ID"
        )
    html.write_text(make_page(page.as_svg(figure), told, found, search), encoding="utf-8")
    return told, (picture, html)


def _finding(source: str) -> FoundScale:
    if is_experiment(source):
        return read_finding(int(source))
    return FoundScale.read(Path(source))


def _predicted(search: Source) -> tuple[FoundScale | None, list[str]]:
    """The finding, or a sentence on why there is none: the report is useful without it too."""
    try:
        return predict(search), []
    except UserError as error:
        return None, [
            f"no prediction: {one_line(error)}. Where the experiment is, `python -m determined_amp "
            "find CONFIG --json FILE` or `det experiment create hp_search/find_loss_scale.yaml .` "
            "makes one for --finding"
        ]


def _answer(found: FoundScale | None) -> list[str]:
    """The finder's sentences, its verdict first."""
    said = finder_sentences(found) if found else ()
    return sorted(said, key=lambda sentence: not sentence.startswith("verdict: "))


def make_page(svg: str, told: Sequence[str], found: FoundScale | None, search: Source) -> str:
    """The HTML page: the answer, the figure, the tables and the origin of the numbers.

    Args:
        svg: The figure, from `reports.page.as_svg`.
        told: Sentences, the verdict first.
        found: The finding; None without one.
        search: The runs of the search.
    """
    lines = lines_to_paste(found) if found else ""
    parts = [
        page.verdict(told[0], lines),
        page.bullets(told[1:]),
        page.picture(svg, _CAPTION),
        *(_finding_tables(found.finding) if found else ()),
        _trials(search),
        page.footer(_provenance(found, search)),
    ]
    return page.document(f"Initial loss scale: {search.name}", parts)


def _provenance(found: FoundScale | None, search: Source) -> dict[str, Mapping[str, Any]]:
    seeds = {run.seed for run in search.runs if run.seed is not None}
    trials: dict[str, Any] = {"trials": len(search.runs), "seeds": len(seeds) or "unknown"}
    machine = search.runs[0].machine
    facts = {"device": machine.device, "torch": machine.torch, "date": search.runs[0].date}
    known = {**facts, **machine.versions} if machine != Machine() else {}
    parts: dict[str, Mapping[str, Any]] = {
        "search": {"from": search.origin, **trials, **known},
        "drawn": drawn_with(),
    }
    if found is None:
        return parts
    names = ("device", "torch", "date", "batches", "samples")
    return {"finder": {name: vars(found.run)[name] for name in names}, **parts}


def _finding_tables(finding: Finding) -> Iterable[str]:
    measured = {m.scale_log2: m for m in finding.verified}
    scales = (
        [
            power(p.scale_log2),
            f"{p.overflow_share:.2g}",
            f"{p.flushed_share:.2g}",
            _measured(measured.get(p.scale_log2)),
        ]
        for p in finding.predicted
    )
    heads = ["init_scale", "overflow", "flushed to 0", "measured in float16"]
    yield page.table("Scales: share of the gradient values", heads, scales)
    modules = (
        [m.name, power(min(m.values_by_log2)), power(max(m.values_by_log2) + 1)]
        if m.values_by_log2
        else [m.name, "all 0", ""]
        for m in reversed(finding.modules)
    )
    yield page.table(
        "Modules: gradients without a scale", ["module", "smallest", "largest, below"], modules
    )


def _measured(seen: Observation | None) -> str:
    if seen is None:
        return ""
    return "overflow" if seen.overflow else f"{seen.flushed_share:.2g} flushed"


def _trials(search: Source) -> str:
    known = {name for run in search.runs for name in run.metrics}
    metrics = [m for m in (search.metric, *_METRICS) if m in known]
    skips = any(run.skipped_steps is not None for run in search.runs)
    heads = ["trial", "init_scale", *search.also_searched, "state", "batches", *metrics]
    heads += [MetricName.SKIPPED_STEPS] if skips else []
    rows = []
    for run in sorted(search.runs, key=lambda run: (run.scale_log2, run.number)):
        others = [str(run.hparams.get(name, "")) for name in search.also_searched]
        values = [_number(run.metrics.get(name)) for name in metrics]
        values += [_number(run.skipped_steps)] if skips else []
        start = [str(run.number), power(run.scale_log2), *others, run.state.value, str(run.batches)]
        rows.append([*start, *values])
    return page.table(f"Trials: {len(rows)}", heads, rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
