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
from determined_amp.experiment.experiment import TRIAL_SEED
from determined_amp.experiment.machine import Machine
from determined_amp.finder.found_scale import FoundScale, scale_lines
from determined_amp.finder.found_scale import scale_sentences as finder_sentences
from determined_amp.finder.scale_finding import ScaleFinding
from determined_amp.finder.scale_score import worth_of_best
from determined_amp.local.open_trial import open_trial
from determined_amp.report import ReportError, page
from determined_amp.report.loss_scale_figure import draw, points_of, predicted_score, seed_band
from determined_amp.report.master_runs import read_finding
from determined_amp.report.sources import is_experiment
from determined_amp.runs.run import SCALE, SCORE, is_scale
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
    "flushed to 0. Red: a gradient overflows, the step is skipped, the scale halved. "
    "Amber band: mean and standard deviation over seeds, inside the window. Hollow: stopped early."
)

# The sections of a configuration that the finder needs; a master fills in more.
_SECTIONS = ("name", "entrypoint", "data", "hyperparameters", "searcher", "reproducibility")

# What finds on a cluster, whatever trial a search has.
_FIND_THERE = "the entrypoint `python3 -m determined_amp find` on its YAML without ranges"

# A best value within this many standard deviations of the window's mean counts as a tie.
_SDS_OF_A_TIE = 2.0


def write_report(
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
    of_the_finder = finder_sentences(predicted) if predicted else ()
    answer_first = sorted(of_the_finder, key=lambda line: not line.startswith("verdict: "))
    lines = [*answer_first, *sentences(predicted, search), *remarks]
    heads, rows = _facts(search)
    record = {
        "answer": lines[0],
        "sentences": lines,
        "search": search.origin,
        "metric": search.metric,
        "trials": [dict(zip(heads, row, strict=True)) for row in rows],
        "finding": predicted.as_json() if predicted else None,
    }
    markdown, figure = text(lines, predicted, search), draw(predicted, search)
    return lines, page.write(folder, NAME, markdown, figure, record)


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
        predicted = predict(search)
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


def text(lines: Sequence[str], predicted: FoundScale | None, search: Search) -> str:
    """The report as Markdown: the answer first, then sentences, the picture and the trials."""
    heads, rows = _facts(search)
    parts = [
        f"# {lines[0]}",
        f"```yaml\n{scale_lines(predicted)}\n```" if predicted else "",
        "\n".join(f"* {sentence}" for sentence in lines[1:]),
        f"![{_CAPTION}]({NAME}.png)",
        page.table(heads, ([_cell(value) for value in row] for row in rows)),
        _origin(predicted, search),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(search: Search) -> tuple[list[str], list[list[Any]]]:
    """The heads and the rows of the table of trials, the smallest scale first."""
    others = search.also_searched
    known = {name for run in search.runs for name in run.metrics}
    metrics = [m for m in dict.fromkeys((search.metric, *_METRICS)) if m in known]
    skips = any(run.skipped_steps is not None for run in search.runs)
    heads = ["trial", "init_scale", *others, "state", "batches", *metrics]
    rows = []
    for run in sorted(search.runs, key=lambda run: (run.scale_log2, run.number)):
        row = [run.number, 2.0**run.scale_log2, *map(run.hparams.get, others)]
        row += [run.state.value, run.batches, *map(run.metrics.get, metrics)]
        rows.append([*row, run.skipped_steps] if skips else row)
    return [*heads, MetricName.SKIPPED_STEPS] if skips else heads, rows


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _origin(predicted: FoundScale | None, search: Search) -> str:
    """What the numbers were measured on."""
    seeds = {run.seed for run in search.runs if run.seed is not None}
    machine, date = search.runs[0].machine, search.runs[0].date
    facts = [f"{len(search.runs)} trials of {search.name} ({search.origin})"]
    facts += [f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"] if seeds else []
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


def predict(search: Search) -> FoundScale:
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
    with open_trial(config, search.origin) as opened:
        return opened.find(BATCHES, name=search.name)


def sentences(prediction: FoundScale | None, search: Search) -> Iterator[str]:
    """Sentences on how well prediction and search agree, and on the best trial."""
    if prediction is not None:
        yield from _predicted_and_measured(prediction, search)
    yield from _best(None if prediction is None else prediction.finding, search)
    failed = [run for run in search.runs if run.state.is_failure]
    if failed:
        yield f"{len(failed)} trials failed; trial {failed[0].number}: {failed[0].reason}"
    yield from search.notes


def _predicted_and_measured(prediction: FoundScale, search: Search) -> Iterator[str]:
    """Sentences on the overflows, scores and skips that were predicted and measured."""
    finding, runs = prediction.finding, search.runs
    overflows = [(run.scale_log2, run.overflow) for run in runs if run.overflow is not None]
    wrong = sorted(scale for scale, over in overflows if over is not (scale > finding.top_log2))
    if overflows:
        yield (
            f"overflow: predicted above 2^{finding.top_log2:g}, and "
            f"{len(overflows) - len(wrong)} of {len(overflows)} trials agree"
            + (f"; not those at {', '.join(f'2^{scale:g}' for scale in wrong)}" if wrong else "")
        )
    scores = [
        (r.scale_log2, r.metrics[SCORE], predicted_score(prediction, r.scale_log2))
        for r in runs
        if r.is_scored
    ]
    yield from _agreement(f"{SCORE}: predicted and measured", scores)
    skips = [
        abs(run.skipped_steps - finding.expected_skips(run.scale_log2)) <= 1
        for run in runs
        if run.skipped_steps is not None
    ]
    if skips:
        yield (
            f"skipped steps: {sum(skips)} of {len(skips)} trials skipped what was expected, or one "
            "more or less"
        )


def _agreement(what: str, trials: Sequence[tuple[float, float, float]]) -> Iterator[str]:
    """How far two numbers are apart; each trial gives log2 of its scale, and both numbers."""
    if trials:
        most, where = max((abs(one - other), scale) for scale, one, other in trials)
        apart = f"differ by {most:.2g} at most, at 2^{where:g}" if most else "are the same"
        yield f"{what} {apart} ({len(trials)} trials)"


def _best(finding: ScaleFinding | None, search: Search) -> Iterator[str]:
    points = points_of(search)
    if not points:
        yield f"no trial reported {search.metric} yet"
        return
    best = points[0]
    choice = None if finding is None else finding.answer_log2
    yield f"best trial: 2^{best.scale_log2:g} with {search.metric} {best.value:.4g}" + (
        "" if choice is None else f"; the finder chose 2^{choice:g}"
    )
    if search.also_searched:
        others = ", ".join(search.also_searched)
        yield f"the trials differ in {others}, too: {search.metric} does not rank the scales alone"
        return
    worth = worth_of_best(
        search.metric, [(run.scale_log2, run.metrics.get("steps_lost")) for run in search.ranked()]
    )
    if worth is not None:
        yield worth
    is_scored = any(run.is_scored for run in search.runs)
    band = None if is_scored else seed_band(points, finding)
    if band is not None:
        centre, spread = band
        distance = abs(best.value - centre)
        word = "a tie" if distance <= _SDS_OF_A_TIE * spread else "more than the seeds' noise"
        yield (
            f"inside the window {search.metric} is {centre:.4g}, and seeds differ by {spread:.2g} "
            f"(standard deviation); the best is {distance:.2g} from that: {word}"
        )
