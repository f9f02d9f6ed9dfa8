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
from determined_amp.finder.advice import FoundScale, lines_to_paste
from determined_amp.finder.advice import sentences as finder_sentences
from determined_amp.finder.score import worth_of_best
from determined_amp.finder.verdict import Finding
from determined_amp.local.open_trial import open_trial
from determined_amp.report import ReportError, page
from determined_amp.report.loss_scale_figure import draw, points_of, predicted_score, seed_band
from determined_amp.report.master_runs import read_finding
from determined_amp.report.sources import is_experiment
from determined_amp.runs.run import SCALE, is_scale
from determined_amp.search.search_folder import Search

NAME = "loss_scale"

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

# The sections of a configuration that the finder needs; a master fills in more.
_SECTIONS = ("name", "entrypoint", "data", "hyperparameters", "searcher", "reproducibility")

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
    predicted = None
    if finding:
        number = int(finding) if is_experiment(finding) else None
        predicted = FoundScale.read(Path(finding)) if number is None else read_finding(number)
    search = over_loss_scale(source)
    missing: list[str] = []
    if predicted is None:
        predicted, missing = _predicted(search)
    lines = [*_answer(predicted), *sentences(predicted, search), *missing]
    if predicted and not finding and on_cluster:
        lines.append(
            f"predicted here, on {predicted.run.device} with torch {predicted.run.torch}, which "
            "the cluster need not have: det experiment create hp_search/find_loss_scale.yaml . "
            "predicts there, for --finding ID"
        )
    record = {
        "answer": lines[0],
        "sentences": lines,
        "search": search.origin,
        "metric": search.metric,
        "trials": [dict(zip(*row, strict=True)) for row in _facts(search)],
        "finding": predicted.as_json() if predicted else None,
    }
    markdown, figure = text(lines, predicted, search), draw(predicted, search)
    return lines, page.write(folder, NAME, markdown, figure, record)


def _predicted(search: Search) -> tuple[FoundScale | None, list[str]]:
    """The finding, or a sentence on why there is none: the report is useful without it too."""
    try:
        return predict(search), []
    except UserError as error:
        return None, [
            f"no prediction: {one_line(error)}. Where the experiment is, `python -m determined_amp "
            "find CONFIG --json FILE` or `det experiment create hp_search/find_loss_scale.yaml .` "
            "makes one for --finding"
        ]


def _answer(predicted: FoundScale | None) -> list[str]:
    """The finder's sentences, its verdict first."""
    of_the_finder = finder_sentences(predicted) if predicted else ()
    return sorted(of_the_finder, key=lambda sentence: not sentence.startswith("verdict: "))


def text(lines: Sequence[str], predicted: FoundScale | None, search: Search) -> str:
    """The report as Markdown: the answer first, then sentences, the picture and the trials."""
    facts = _facts(search)
    rows = [[_cell(value) for value in values] for _, values in facts]
    parts = [
        f"# {lines[0]}",
        f"```yaml\n{lines_to_paste(predicted)}\n```" if predicted else "",
        "\n".join(f"* {sentence}" for sentence in lines[1:]),
        f"![{_CAPTION}]({NAME}.png)",
        page.table(facts[0][0], rows),
        _origin(predicted, search),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(search: Search) -> list[tuple[list[str], list[Any]]]:
    """The names and the values of what the table says of each trial, the smallest scale first."""
    known = {name for run in search.runs for name in run.metrics}
    metrics = [m for m in dict.fromkeys((search.metric, *_METRICS)) if m in known]
    skips = any(run.skipped_steps is not None for run in search.runs)
    heads = ["trial", "init_scale", *search.also_searched, "state", "batches", *metrics]
    heads += [MetricName.SKIPPED_STEPS] if skips else []
    facts = []
    for run in sorted(search.runs, key=lambda run: (run.scale_log2, run.number)):
        others = [run.hparams.get(name) for name in search.also_searched]
        values = [run.number, 2.0**run.scale_log2, *others, run.state.value, run.batches]
        values += [run.metrics.get(name) for name in metrics]
        facts.append((heads, [*values, run.skipped_steps] if skips else values))
    return facts


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


def predict(search: Search, batches: int = 4) -> FoundScale:
    """Run the finder on the experiment of a search, with the seed of the search.

    Args:
        search: The search. Hyperparameters other than the scale come from its first trial.
        batches: Number of training batches to use.

    Raises:
        ConfigError: if the experiment is not on this machine, or is wrong.
        LossScaleError: if no loss scale can be found.
    """
    config = _experiment(search)
    with open_trial(config, search.origin) as opened:
        return opened.find(batches, name=search.name)


def _experiment(search: Search) -> dict[str, Any]:
    """The experiment of a search, with the default scale instead of a searched one."""
    sample = search.runs[0].hparams
    plain = {key: search.config[key] for key in _SECTIONS if search.config.get(key) is not None}
    frequency = value_at(search.config, "optimizations.aggregation_frequency")
    # Determined's own form has it there; ours has a hyperparameter for it.
    if isinstance(frequency, int) and frequency > 1:
        plain["optimizations"] = {"aggregation_frequency": frequency}
    constants = flat(search.config["hyperparameters"])
    values = {n: v for n, v in {**constants, **sample}.items() if not isinstance(v, Mapping)}
    kept = {n: value for n, value in values.items() if n != TRIAL_SEED and not is_scale(n)}
    return {**plain, "hyperparameters": nested(kept)}


def sentences(prediction: FoundScale | None, search: Search) -> Iterator[str]:
    """Sentences on how well prediction and search agree, and on the best trial."""
    finding = None if prediction is None else prediction.finding
    if prediction is not None and finding is not None:
        yield from _overflow(finding, search)
        yield from _flush(finding, search)
        yield from _scores(prediction, search)
        yield from _skips(finding, search)
    yield from _best(finding, search)
    failed = [run for run in search.runs if run.state.is_failure]
    if failed:
        yield f"{len(failed)} trials failed; trial {failed[0].number}: {failed[0].reason}"
    yield from search.notes


def _overflow(finding: Finding, search: Search) -> Iterator[str]:
    measured = [(run.scale_log2, run.overflow) for run in search.runs if run.overflow is not None]
    if not measured:
        return
    wrong = sorted(scale for scale, over in measured if over is not (scale > finding.top_log2))
    yield (
        f"overflow: predicted above 2^{finding.top_log2:g}, and "
        f"{len(measured) - len(wrong)} of {len(measured)} trials agree"
        + (f"; not those at {', '.join(f'2^{scale:g}' for scale in wrong)}" if wrong else "")
    )


def _flush(finding: Finding, search: Search) -> Iterator[str]:
    predicted = {p.scale_log2: p.flushed_share for p in finding.predicted}
    differences = [
        (abs(run.metrics["flushed_share"] - predicted[int(run.scale_log2)]), run.scale_log2)
        for run in search.runs
        if "flushed_share" in run.metrics and not run.overflow and run.scale_log2 in predicted
    ]
    yield from _agreement("flushed to 0: predicted and measured shares", differences)


def _scores(prediction: FoundScale, search: Search) -> Iterator[str]:
    differences = [
        (
            abs(run.metrics["loss_scale_score"] - predicted_score(prediction, run.scale_log2)),
            run.scale_log2,
        )
        for run in search.runs
        if run.is_scored
    ]
    yield from _agreement("loss_scale_score: predicted and measured", differences)


def _agreement(what: str, differences: Sequence[tuple[float, float]]) -> Iterator[str]:
    """How far two numbers are apart, by the distance and log2 of the scale of each trial."""
    if differences:
        most, where = max(differences)
        apart = f"differ by {most:.2g} at most, at 2^{where:g}" if most else "are the same"
        yield f"{what} {apart} ({len(differences)} trials)"


def _skips(finding: Finding, search: Search) -> Iterator[str]:
    measured = [
        (run.skipped_steps, finding.expected_skips(run.scale_log2))
        for run in search.runs
        if run.skipped_steps is not None
    ]
    if measured:
        near = sum(abs(skipped - expected) <= 1 for skipped, expected in measured)
        yield (
            f"skipped steps: {near} of {len(measured)} trials skipped what was expected, or one "
            "more or less"
        )


def _best(finding: Finding | None, search: Search) -> Iterator[str]:
    points = points_of(search)
    if not points:
        yield f"no trial reported {search.metric} yet"
        return
    best = points[0]
    yield (
        f"best trial: 2^{best.scale_log2:g} with {search.metric} {best.value:.4g}"
        + (
            ""
            if finding is None or finding.answer_log2 is None
            else f"; the finder chose 2^{finding.answer_log2:g}"
        )
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
    scored = any(run.is_scored for run in search.runs)
    band = None if scored else seed_band(points, finding)
    if band is not None and finding is not None:
        centre, spread = band
        distance = abs(best.value - centre)
        word = "a tie" if distance <= _SDS_OF_A_TIE * spread else "more than the seeds' noise"
        yield (
            f"inside the window {search.metric} is {centre:.4g}, and seeds differ by {spread:.2g} "
            f"(standard deviation); the best is {distance:.2g} from that: {word}"
        )
