"""The command `report loss-scale`: draw the finder's prediction and the results of a search.

    python -m determined_amp report loss-scale runs/loss-scale-grid/TIME # without a cluster
    python -m determined_amp report loss-scale 12                        # on DET_MASTER
    python -m determined_amp report loss-scale SOURCE [--finding FINDING] [--output FOLDER]

It writes loss_scale.png and loss_scale.html. It runs the finder on this machine, which takes
seconds, unless FINDING names a finding: a file written by
`python -m determined_amp find CONFIG --json FILE`, or the id of an experiment of
`hp_search/find_loss_scale.yaml`, which ran on the cluster's own device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_amp.amp.metrics import MetricName
from determined_amp.config.errors import UserError, one_line
from determined_amp.finder.advice import FoundScale, lines_to_paste
from determined_amp.finder.advice import sentences as finder_sentences
from determined_amp.finder.passes import Observation
from determined_amp.finder.verdict import Finding
from determined_amp.reports import page, report_command
from determined_amp.reports.loss_scale_figure import draw
from determined_amp.reports.loss_scale_panels import power
from determined_amp.reports.loss_scale_text import over_loss_scale, predict, sentences
from determined_amp.reports.master_runs import read_finding
from determined_amp.reports.source import Source
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; return the exit status, 0.

    Raises:
        UserError: if the report cannot be made.
    """
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp report loss-scale",
        description="Draw the predicted and the observed effects of the initial loss scale.",
    )
    parser.add_argument(
        "source",
        metavar="STUDY_OR_EXPERIMENT_ID",
        help="folder of a local search, or id of an experiment on the master of DET_MASTER",
    )
    parser.add_argument(
        "--finding",
        metavar="FILE_OR_EXPERIMENT_ID",
        help="the finder's JSON, or its experiment on the master, instead of running it here",
    )
    return report_command.run(_report, parser, arguments)


def _report(options: argparse.Namespace) -> None:
    given = _finding(options.finding) if options.finding else None
    source = report_command.read(options.source)
    report_command.refuse_precisions(options.source, source)
    search = over_loss_scale(source)
    found, missing = (given, []) if given else _predicted(search)
    folder = options.output or report_command.folder_beside(options.source)
    figure = draw(found, search)
    page.save_png(figure, folder / "loss_scale.png")
    told = [*_answer(found), *sentences(found, search), *missing]
    if report_command.is_experiment(options.source) and found and not given:
        told.append(
            f"predicted here, on {found.run.device} with torch {found.run.torch}, which the "
            "cluster need not have: det experiment create hp_search/find_loss_scale.yaml . "
            "predicts there, for --finding ID"
        )
    (folder / "loss_scale.html").write_text(
        make_page(page.as_svg(figure), told, found, search), encoding="utf-8"
    )
    print("\n".join(told))
    print(f"written: {folder / 'loss_scale.png'} and {folder / 'loss_scale.html'}")


def _finding(source: str) -> FoundScale:
    if report_command.is_experiment(source):
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
        "drawn": report_command.drawn(),
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
