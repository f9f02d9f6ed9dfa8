"""The report on a loss-scale search: the finder's prediction beside what the trials measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.metric_names import MetricName
from determined_amp.experiment.dotted import flat, nested, value_at
from determined_amp.experiment.experiment import TRIAL_SEED, experiment_in
from determined_amp.experiment.machine import Machine
from determined_amp.finder.found_scale import FoundScale, scale_lines, scale_sentences
from determined_amp.finder.scale_score import worth_of_best
from determined_amp.local.open_trial import open_trial
from determined_amp.report import ReportError
from determined_amp.report.loss_scale_figure import draw_loss_scale, predicted_score
from determined_amp.report.master_runs import read_finding
from determined_amp.report.page import markdown_table, write_page
from determined_amp.report.sources import is_experiment
from determined_amp.runs.run import SCALE, SCORE, Run, is_scale
from determined_amp.search.search_folder import Search
from determined_amp.search.task import BATCHES

NAME = "loss_scale"

# Columns of the trial table, after the searcher's metric.
_METRICS = (
    *("steps_lost", "flushed_share", "overflow", "backward_headroom_bits"),
    "validation_accuracy",
)

_CAPTION = (
    "Lines are predicted from one bfloat16 backward per batch, crosses are measured in float16. "
    "Green: the safe window: nothing overflows, and no gradient loses more than 0.1 % of its norm, "
    "flushed to 0. Red: a gradient overflows, the step is skipped, the scale halved."
)

# The sections of a configuration that the finder needs; a master fills in more.
_SECTIONS = ("name", "entrypoint", "data", "hyperparameters", "searcher", "reproducibility")

# What finds on a cluster, whatever trial a search has.
_FIND_THERE = "the entrypoint `python3 -m determined_amp find` on its YAML without ranges"


def write_loss_scale_report(
    source: Search, folder: Path, finding: str | None = None, *, on_cluster: bool = False
) -> tuple[list[str], list[Path]]:
    """Write the report on a search.

    Args:
        source: The search.
        folder: The output folder.
        finding: The finder's JSON file, or its experiment; None: the finder runs here.
        on_cluster: Whether the search ran on a cluster.

    Returns:
        The sentences of the report, the answer first, and its files.

    Raises:
        UserError: if the report cannot be made.
    """
    search = over_loss_scale(source)
    predicted, remarks = _prediction(search, finding, on_cluster=on_cluster)
    of_the_finder = list(scale_sentences(predicted)) if predicted else []
    of_the_finder.sort(key=lambda line: not line.startswith("verdict: "))
    lines = [*_not_counted(search), *of_the_finder, *search_sentences(predicted, search)]
    lines += remarks
    heads, rows = _trials(search)
    table = markdown_table(heads, [[_cell(value) for value in row] for row in rows])
    paste = f"```yaml\n{scale_lines(predicted)}\n```" if predicted else ""
    items = "\n".join(f"* {sentence}" for sentence in lines[1:])
    figure_line = f"![{_CAPTION}]({NAME}.png)"
    parts = [f"# {lines[0]}", paste, items, figure_line, table, _origin(predicted, search)]
    markdown = "\n\n".join(filter(None, parts))
    record = {
        "answer": lines[0],
        "sentences": lines,
        "search": search.origin,
        "metric": search.metric,
        "trials": [dict(zip(heads, row, strict=True)) for row in rows],
        "finding": predicted.as_json() if predicted else None,
    }
    figure = draw_loss_scale(predicted, search)
    return lines, write_page(folder, NAME, f"{markdown}\n", figure, record)


def _prediction(
    search: Search, finding: str | None, *, on_cluster: bool
) -> tuple[FoundScale | None, list[str]]:
    """The given finding, or one made here, with a sentence on its origin or on what failed."""
    if finding:
        on_master = is_experiment(finding)
        given = read_finding(int(finding)) if on_master else FoundScale.read(Path(finding))
        run = given.run
        return given, [
            f"predicted by {finding}, of {run.name}: {run.samples} samples, on {run.device} with "
            f"torch {run.torch}, {run.date}; nothing tells whether that is the trial of the search"
        ]
    try:
        predicted = find_for_search(search)
    except UserError as error:  # the report is useful without it, too
        return None, [
            f"no prediction: {one_line(error)}. Where the experiment is, `python -m determined_amp "
            f"find CONFIG --json FILE` makes one for --finding; on a cluster, {_FIND_THERE} does"
        ]
    here = (
        f"predicted here, on {predicted.run.device} with torch {predicted.run.torch}, which the "
        f"cluster need not have; {_FIND_THERE} predicts there, for --finding ID"
    )
    return predicted, [here] if on_cluster else []


def _trials(search: Search) -> tuple[list[str], list[list[Any]]]:
    """The heads and the rows of the table of trials, the smallest scale first."""
    others = search.also_searched
    known = {name for run in search.runs for name in run.metrics}
    metrics = [name for name in _METRICS if name in known]
    heads = ["trial", "init_scale", *others, "state", "batches", search.metric, *metrics]
    skips = any(run.skipped_steps is not None for run in search.runs)
    rows = []
    for run in sorted(search.runs, key=lambda run: (run.scale_log2, run.number)):
        row = [run.number, 2.0**run.scale_log2, *map(run.hparams.get, others)]
        row += [run.state.value, run.batches, search.value(run), *map(run.metrics.get, metrics)]
        rows.append([*row, run.skipped_steps] if skips else row)
    return [*heads, MetricName.SKIPPED_STEPS] if skips else heads, rows


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _origin(predicted: FoundScale | None, search: Search) -> str:
    """What the numbers were measured on."""
    machine, date = search.runs[0].machine, search.runs[0].date
    facts = [f"{len(search.runs)} trials of {search.name} ({search.origin})"]
    if machine != Machine():
        facts.append(f"on {machine.device}, torch {machine.torch}, {date}")
    if predicted:
        run = predicted.run
        facts.append(
            f"predicted on {run.device}, torch {run.torch}, {run.date}, from {run.batches} batches "
            f"with {run.samples} samples"
        )
    return f"{'; '.join(facts)}."


def over_loss_scale(search: Search) -> Search:
    """The search, with only those runs that have an initial loss scale.

    Raises:
        ReportError: if no run has a loss scale.
    """
    if not search.runs:
        noted = f" ({'; '.join(search.notes)})" if search.notes else ""
        raise ReportError(
            f"{search.origin}: has no trials yet{noted}; draw it when the first has ended"
        )
    runs = tuple(run for run in search.runs if not math.isnan(run.scale_log2))
    if not runs:
        spaces = flat(search.config.get("hyperparameters") or {})
        searched = [name for name, value in spaces.items() if isinstance(value, Mapping)]
        raise ReportError(
            f"{search.origin}: no hyperparameter is called {SCALE}; it searches over "
            f"{', '.join(searched) or 'nothing'}. Allowed: an experiment with amp.{SCALE}, such "
            "as hp_search/loss_scale_grid.yaml"
        )
    return dataclasses.replace(search, runs=runs)


def find_for_search(search: Search) -> FoundScale:
    """Run the finder on the experiment of a search, with the seed of the search.

    The scale is the default. Other searched hyperparameters are those of the first trial.

    Raises:
        ConfigError: if the experiment is not on this machine, or is wrong.
        LossScaleError: if no loss scale can be found.
    """
    plain = {key: search.config[key] for key in _SECTIONS if search.config.get(key) is not None}
    frequency = value_at(search.config, "optimizations.aggregation_frequency")
    # Determined's own form has it there; ours has a hyperparameter for it.
    if isinstance(frequency, int) and frequency > 1:
        plain["optimizations"] = {"aggregation_frequency": frequency}
    values = {**flat(search.config["hyperparameters"]), **search.runs[0].hparams}
    kept = {
        name: value
        for name, value in values.items()
        if not (isinstance(value, Mapping) or name == TRIAL_SEED or is_scale(name))
    }
    config = {**plain, "hyperparameters": nested(kept)}
    with open_trial(experiment_in(config, search.origin)) as opened:
        return opened.find(BATCHES, name=search.name)


def search_sentences(predicted: FoundScale | None, search: Search) -> Iterator[str]:
    """Sentences on how well prediction and search agree, and on the best trial."""
    if predicted is not None:
        yield from _agreement(predicted, search.runs)
    yield from _best(predicted, search)
    failed = [run for run in search.runs if run.state.is_failure]
    if failed:
        yield f"{len(failed)} trials failed; trial {failed[0].number}: {failed[0].reason}"
    yield from search.notes


def _agreement(predicted: FoundScale, runs: Sequence[Run]) -> Iterator[str]:
    """Sentences on the overflows and scores that were predicted and measured."""
    top = predicted.finding.top_log2
    measured = [run for run in runs if run.overflow is not None]
    wrong = [run.scale_log2 for run in measured if run.overflow is not (run.scale_log2 > top)]
    if measured:
        agree = f"{len(measured) - len(wrong)} of {len(measured)} trials agree"
        at = ", ".join(f"2^{scale:g}" for scale in sorted(wrong))
        but = f"; not those at {at}" if wrong else ""
        yield f"overflow: predicted above 2^{top:g}, and {agree}{but}"
    apart = {}
    for run in runs:
        if run.is_scored:
            expected = predicted_score(predicted, run.scale_log2)
            apart[run.scale_log2] = abs(run.metrics[SCORE] - expected)
    if apart:
        where = max(apart, key=lambda scale: apart[scale])
        differ = f"differ by {apart[where]:.2g} at most, at 2^{where:g}"
        yield f"{SCORE}: predicted and measured {differ if apart[where] else 'are the same'}"


def _best(predicted: FoundScale | None, search: Search) -> Iterator[str]:
    ranked = search.ranked()
    if not ranked:
        yield f"no trial reported {search.metric} yet"
        return
    best = ranked[0]
    choice = None if predicted is None else predicted.finding.answer_log2
    chosen = "" if choice is None else f"; the finder chose 2^{choice:g}"
    value = search.value(best)
    yield f"best trial: 2^{best.scale_log2:g} with {search.metric} {value:.4g}{chosen}"
    if search.also_searched:
        others = ", ".join(search.also_searched)
        yield f"the trials differ in {others}, too: {search.metric} does not rank the scales alone"
        return
    lost = [(run.scale_log2, run.metrics.get("steps_lost")) for run in ranked]
    worth = worth_of_best(search.metric, lost)
    if worth is not None:
        yield worth


def _not_counted(search: Search) -> Iterator[str]:
    """Why another trial than the one that the platform calls the best is named here."""
    ranked = search.ranked()
    reported = [run for run in search.runs if search.value(run) is not None]
    if not ranked or not reported:
        return
    best = min(reported, key=search.order)
    if search.order(best) < search.order(ranked[0]):
        yield (
            f"trial {best.number} reported the best {search.metric}, {search.value(best):.4g}, and "
            f"does not count, although the platform may name it: {best.state.value}: {best.reason}"
        )
