"""The report on a loss-scale search: the finder's prediction beside what the trials
measured.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import yaml_lines
from determined_amp.finder.found_scale import FoundScale, scale_lines, scale_sentences
from determined_amp.report import ReportError, Runs, Sentences
from determined_amp.report.loss_scale_figure import draw_loss_scale
from determined_amp.report.master_runs import read_finding
from determined_amp.report.page import Row, Table, Written, write_page
from determined_amp.report.sources import is_experiment
from determined_amp.runs.run import SCALE
from determined_amp.search.search_folder import Search

# Columns of the trial table, after the searcher's metric, where a trial has them.
_METRICS = (
    "steps_lost",
    "flushed_share",
    "overflow",
    "backward_headroom_bits",
    "validation_accuracy",
    MetricName.SKIPPED_STEPS,
)

_CAPTION = (
    "Lines are predicted from one bfloat16 backward per batch, crosses are measured in "
    "float16. Green: the safe range: nothing overflows, and no gradient loses more "
    "than 0.1 % of its norm, flushed to 0. Red: a gradient overflows, the step is "
    "skipped, the scale halved."
)

# What predicts the effects of a scale.
_FIND = (
    "`det-amp find CONFIG --json FILE` predicts it, for --finding "
    "FILE; on a cluster a run of hp_search/find_loss_scale.yaml does, for --finding ID"
)


def write_loss_scale_report(
    source: Search, folder: Path, finding: str | None = None
) -> Written:
    """Write the report on a search.

    Args:
        source: The search.
        folder: The output folder.
        finding: The finder's JSON file, or its experiment; None: no prediction.

    Raises:
        UserError: if the report cannot be made.
    """
    search = over_loss_scale(source)
    predicted, remark = _prediction(finding) if finding else (None, _FIND)
    advice = search.scale_advice
    lines = [*search_sentences(predicted, search), remark]
    begins = "best trial" if advice is None else advice.text
    if predicted is not None:
        lines = [*scale_sentences(predicted), *lines]
        begins = "verdict: "
    lines.sort(key=lambda line: not line.startswith(begins))
    rows = _trials(search)
    record = {
        "search": search.origin,
        "metric": search.metric,
        "trials": [dict(row) for row in rows],
        "finding": predicted.as_json() if predicted else None,
    }
    return write_page(
        folder,
        "loss_scale",
        answer=lines[0],
        yaml=_lines(predicted, search),
        sentences=lines[1:],
        figure=draw_loss_scale(predicted, search),
        caption=_CAPTION,
        table=rows,
        origin=_origin(search),
        record=record,
    )


def _lines(predicted: FoundScale | None, search: Search) -> str:
    """Lines to paste; empty where the default is fine, or nothing tells a scale."""
    if predicted is not None:
        return scale_lines(predicted)
    advice = search.scale_advice
    if advice is None or advice.scale_log2 is None:
        return ""
    return yaml_lines({"init_scale": 2.0**advice.scale_log2})


def _prediction(finding: str) -> tuple[FoundScale, str]:
    """The given finding, with a sentence on its origin."""
    if is_experiment(finding):
        predicted = read_finding(int(finding))
    else:
        predicted = FoundScale.read(Path(finding))
    run = predicted.run
    return predicted, (
        f"predicted by {finding}, of {run.name}: {run.samples} samples, on "
        f"{run.device} with torch {run.torch}, {run.date}; nothing tells whether that "
        "is the trial of the search"
    )


def _trials(search: Search) -> Table:
    """A row per trial, the smallest scale first."""
    runs = sorted(search.runs, key=lambda run: run.scale_log2)
    numbers = [
        {**run.metrics, MetricName.SKIPPED_STEPS: run.skipped_steps} for run in runs
    ]
    metrics = [
        name for name in _METRICS if any(one.get(name) is not None for one in numbers)
    ]
    rows = []
    for run, of_run in zip(runs, numbers, strict=True):
        row: Row = [("trial", run.number), ("init_scale", 2.0**run.scale_log2)]
        row += [(name, run.hparams.get(name)) for name in search.also_searched]
        row += [("state", run.state.value), ("batches", run.batches)]
        row.append((search.metric, search.value(run)))
        row += [(name, of_run.get(name)) for name in metrics]
        rows.append(row)
    return rows


def _origin(search: Search) -> str:
    """What the trials were measured on."""
    first = search.runs[0]
    trials = f"{len(search.runs)} trials of {search.name} ({search.origin})"
    if not first.date:
        return f"{trials}."
    return (
        f"{trials}; on {first.machine.device}, torch {first.machine.torch},"
        f" {first.date}."
    )


def over_loss_scale(search: Search) -> Search:
    """The search, with only those runs that have an initial loss scale.

    Raises:
        ReportError: if no run has a loss scale.
    """
    if not search.runs:
        found = "; ".join([f"{search.origin}: has no trials yet", *search.notes])
        raise ReportError(f"{found}; draw it when the first has ended")
    runs = tuple(run for run in search.runs if math.isfinite(run.scale_log2))
    if not runs:
        raise ReportError(
            f"{search.origin}: no trial has an initial loss scale; allowed: an "
            f"experiment with {SCALE}, such as hp_search/loss_scale_grid.yaml"
        )
    return dataclasses.replace(search, runs=runs)


def search_sentences(predicted: FoundScale | None, search: Search) -> Sentences:
    """Sentences on how well prediction and search agree, and on the best trial."""
    if predicted is not None:
        yield from _agreement(predicted, search.runs)
    yield from _best(search)
    failed = [run for run in search.runs if run.state.is_failure]
    if failed:
        yield (
            f"{len(failed)} of {len(search.runs)} trials failed: they do not count, "
            "although the platform may name one as the best; trial "
            f"{failed[0].number}: {failed[0].reason}"
        )
    yield from search.notes


def _agreement(predicted: FoundScale, runs: Runs) -> Sentences:
    """A sentence on the overflows that were predicted and measured."""
    top = predicted.finding.top_log2
    measured = [run for run in runs if run.overflow is not None]
    wrong = [
        run.scale_log2 for run in measured if run.overflow is not (run.scale_log2 > top)
    ]
    if measured:
        right = len(measured) - len(wrong)
        at = ", ".join(f"2^{scale:g}" for scale in sorted(wrong))
        but = f"; not those at {at}" if wrong else ""
        agree = f"{right} of {len(measured)} trials agree{but}"
        yield f"overflow: predicted above 2^{top:g}, and {agree}"


def _best(search: Search) -> Sentences:
    ranked = search.ranked()
    if not ranked:
        yield f"no trial reported {search.metric} yet"
        return
    best = ranked[0]
    yield (
        f"best trial: 2^{best.scale_log2:g} with {search.metric}"
        f" {search.value(best):.4g}"
    )
    if search.also_searched:
        others = ", ".join(search.also_searched)
        yield (
            f"the trials differ in {others}, too: {search.metric} does not rank the"
            " scales alone"
        )
    elif search.scale_advice is not None:
        yield search.scale_advice.text
