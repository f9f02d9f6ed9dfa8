"""The report on a loss-scale search: the finder's prediction beside what the trials
measured.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import yaml_lines
from determined_amp.experiment.dotted import put_by_name
from determined_amp.experiment.entrypoint import BATCHES
from determined_amp.experiment.experiment import experiment_in
from determined_amp.finder.found_scale import FoundScale, scale_lines, scale_sentences
from determined_amp.local.open_trial import open_trial
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
    "float16. Green: the safe window: nothing overflows, and no gradient loses more "
    "than 0.1 % of its norm, flushed to 0. Red: a gradient overflows, the step is "
    "skipped, the scale halved."
)

# What finds on a cluster, whatever trial a search has.
_FIND_THERE = (
    "the entrypoint `python3 -m determined_amp find` on its YAML without ranges"
)


def write_loss_scale_report(
    source: Search, folder: Path, finding: str | None = None
) -> Written:
    """Write the report on a search.

    Args:
        source: The search.
        folder: The output folder.
        finding: The finder's JSON file, or its experiment; None: the finder runs here.

    Raises:
        UserError: if the report cannot be made.
    """
    search = over_loss_scale(source)
    predicted, remark = _prediction(search, finding)
    lines = list(scale_sentences(predicted)) if predicted else []
    lines.sort(key=lambda line: not line.startswith("verdict: "))
    lines += [*search_sentences(predicted, search), remark]
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


def _prediction(search: Search, finding: str | None) -> tuple[FoundScale | None, str]:
    """The given finding, or one made here, with a sentence on its origin or on what
    failed.
    """
    try:
        if not finding:
            predicted = find_for_search(search)
        elif is_experiment(finding):
            predicted = read_finding(int(finding))
        else:
            predicted = FoundScale.read(Path(finding))
    except UserError as error:
        if finding:
            raise
        return None, (  # the report is useful without it, too
            f"no prediction: {one_line(error)}. Where the experiment is, `det-amp "
            "find CONFIG --json FILE` makes one for --finding; on a "
            f"cluster, {_FIND_THERE} does"
        )
    run = predicted.run
    measured = (
        f"{run.samples} samples, on {run.device} with torch {run.torch}, {run.date}"
    )
    if finding:
        unknown = "nothing tells whether that is the trial of the search"
        return (
            predicted,
            f"predicted by {finding}, of {run.name}: {measured}; {unknown}",
        )
    there = (
        f"on another device, as of a cluster, {_FIND_THERE} predicts, for --finding ID"
    )
    return predicted, f"predicted here: {measured}; {there}"


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


def find_for_search(search: Search) -> FoundScale:
    """Run the finder on the experiment of a search, with the hyperparameters of the
    first trial.

    The scale is the default.

    Raises:
        ConfigError: if the experiment is not on this machine, or is wrong.
        LossScaleError: if no loss scale can be found.
    """
    space = search.config["hyperparameters"]
    values = copy.deepcopy(dict(space))
    put_by_name(values, search.runs[0].hparams, space)
    amp = values.get("amp")
    if isinstance(amp, dict):
        amp.pop("init_scale", None)
    experiment = experiment_in(search.config, search.origin, hyperparameters=values)
    with open_trial(experiment) as opened:
        return opened.find(BATCHES, name=search.name)


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
