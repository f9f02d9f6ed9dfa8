"""Predicts the results of a loss-scale search, and compares prediction and search in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from determined_amp.experiment.dotted import flat, nested, value_at
from determined_amp.experiment.experiment import TRIAL_SEED
from determined_amp.finder.advice import FoundScale
from determined_amp.finder.score import worth_of_best
from determined_amp.finder.verdict import Finding
from determined_amp.local.open_trial import open_trial
from determined_amp.report import ReportError
from determined_amp.report.loss_scale_figure import points_of
from determined_amp.report.loss_scale_panels import predicted_score, seed_band
from determined_amp.runs.run import SCALE, is_scale
from determined_amp.search.search_folder import Search
from determined_amp.search.task import Task
from determined_amp.trial.frozen import find_in_trial

# The sections of a configuration that the finder needs; a master fills in more.
_SECTIONS = ("name", "entrypoint", "data", "hyperparameters", "searcher", "reproducibility")

# A best value within this many standard deviations of the window's mean counts as a tie.
_SDS_OF_A_TIE = 2.0


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
        return find_in_trial(search.name, opened.trial, opened.context, batches)


def _experiment(search: Search) -> dict[str, Any]:
    """The experiment of a search, with the default scale instead of a searched one."""
    sample = search.runs[0].hparams
    plain = {key: search.config[key] for key in _SECTIONS if search.config.get(key) is not None}
    frequency = value_at(search.config, "optimizations.aggregation_frequency")
    if (
        isinstance(frequency, int) and frequency > 1
    ):  # in Determined's own form; ours has a hyperparameter for it
        plain["optimizations"] = {"aggregation_frequency": frequency}
    constants = flat(search.config["hyperparameters"])
    values = {n: v for n, v in {**constants, **sample}.items() if not isinstance(v, Mapping)}
    kept = {n: value for n, value in values.items() if n != TRIAL_SEED and not is_scale(n)}
    task = Task.of(search.config)
    if task is not None and task.trial is not None:
        plain["entrypoint"] = task.trial
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
    if differences:
        most, where = max(differences)
        yield (
            f"flushed to 0: predicted and measured shares differ by {most:.2g} at most, "
            f"at 2^{where:g} ({len(differences)} trials)"
        )


def _scores(prediction: FoundScale, search: Search) -> Iterator[str]:
    differences = [
        (abs(run.metrics["loss_scale_score"] - predicted_score(prediction, run.scale_log2)), run)
        for run in search.runs
        if run.is_scored
    ]
    if differences:
        most, run = max(differences, key=lambda pair: pair[0])
        yield (
            f"loss_scale_score: predicted and measured differ by {most:.2g} at most, "
            f"at 2^{run.scale_log2:g} ({len(differences)} trials)"
        )


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
    worth = worth_of_best(search.metric, [run.metrics for run in search.ranked()])
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
