"""Run one trial of a search on a Determined cluster: train, compare, score or find.

    entrypoint: python3 -m determined_amp.search.on_cluster VERB

train    Trains like `python -m determined_amp train`. Every validation also reports the initial
         scale and the share of the gradients that it flushes to zero, after the first skips.
compare  Trains without these reports, so memory and speed are those of training alone.
score    Measures on a few frozen batches how many optimizer steps the trial's loss scale loses;
         nothing is trained. All trials use the same parameters and batches, regardless of the
         platform's seeds. Of several that lose none, the platform may name any as the best.
find     Finds the loss scale in one pass over a few batches. The log ends with tables and verdict.
         The checkpoint holds everything in `loss_scale.json`, which
         `python -m determined_amp report loss-scale SEARCH --finding ID` reads. The metric group
         `loss_scale` has the overflow share and the flushed share for every power of two from 2^1
         up. The WebUI plots them over "batches", which here means log2 of the scale.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import determined as det
from determined import core, pytorch
from rich.console import Console

from determined_amp.amp.errors import UserError
from determined_amp.cluster import start_ranks, task_context, train_on_cluster
from determined_amp.experiment.errors import NO_RETRY, exit_status
from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.finder.advice import FILE_NAME
from determined_amp.finder.trial import find_in_trial
from determined_amp.finder.verdict import Finding
from determined_amp.local.context import set_averaging
from determined_amp.search.compose import compose
from determined_amp.search.scale_metrics import (
    batches_to_score,
    batches_to_use,
    report_flushed_share,
    scored,
)
from determined_amp.search.searcher_settings import check_lengths
from determined_amp.search.trial_kind import ENTRYPOINT, TrialKind
from determined_amp.trial.notes import note_on_master
from determined_amp.trial.unmodified import trial_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb and return the exit status: 0, or 2 for an error that a user can fix."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return exit_status(lambda: _run(given), NO_RETRY)


def _run(given: Sequence[str]) -> int:
    kind = next((kind for kind in TrialKind if [kind.value] == list(given)), None)
    if kind is None:
        said = f"got {' '.join(given)!r}" if given else "missing"
        allowed = ", ".join(kind.value for kind in TrialKind)
        raise UserError(f"verb of {ENTRYPOINT}: {said}; allowed: {allowed}")
    info = det.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        print(
            "this runs on a cluster only; without one: python -m determined_amp search SEARCH.yaml",
            file=sys.stderr,
        )
        return 2
    _compose(info)
    if kind is not TrialKind.SCORE:  # scoring uses one slot
        parse(info.trial._config, "search")
        start_ranks(info, ENTRYPOINT, kind.value)
    return _VERBS[kind](info)


def _compose(info: det.ClusterInfo) -> None:
    """Replace the search configuration in `info` with the configuration of this trial's experiment.

    Determined's harness reads the batch size and the searcher from this configuration, and saves it
    in checkpoints. So a checkpoint holds an experiment that trains without its search.
    """
    config = compose(info.trial._config, info.trial.hparams, Path.cwd())
    if info.trial.hparams.get("seed") is not None:
        info.trial.trial_seed = config["reproducibility"]["experiment_seed"]
    info.trial._config = config
    info.trial.hparams = config["hyperparameters"]


def _train(info: det.ClusterInfo) -> int:
    return train_on_cluster(info, prepare=_check_and_measure)


def _check_and_measure(context: pytorch.PyTorchTrialContext, experiment: Experiment[Any]) -> None:
    check_lengths(experiment)
    report_flushed_share(context, experiment)


def _score(info: det.ClusterInfo) -> int:
    experiment = parse(info.trial._config, "search")
    batches = batches_to_score(experiment)
    with _open_trial(info, experiment) as (trial, context):
        report = context._core.train
        report.set_status(f"scoring on {batches} batches")
        metrics = scored(trial, context, experiment, batches)
        report.report_validation_metrics(steps_completed=batches, metrics=metrics)
        report.report_progress(1.0)
    return 0


def _find(info: det.ClusterInfo) -> int:
    experiment = parse(info.trial._config, "search")
    batches = batches_to_use(experiment)
    with _open_trial(info, experiment) as (trial, context):
        found = find_in_trial(experiment.name, trial, context, batches)
        if context.distributed.rank == 0:
            answer = found.finding.answer_log2
            note_on_master(context, init_scale=None if answer is None else 2.0**answer)
            _report(context._core.train, found.finding, batches)
            with context._core.checkpoint.store_path({"steps_completed": batches}) as (folder, _):
                found.write(folder / FILE_NAME)
            context._core.train.report_progress(1.0)
            found.show(Console(width=100))  # last, because the log also contains the reports
    return 0


_VERBS: dict[TrialKind, Callable[[det.ClusterInfo], int]] = {
    TrialKind.TRAIN: _train,
    TrialKind.COMPARE: train_on_cluster,
    TrialKind.SCORE: _score,
    TrialKind.FIND: _find,
}


@contextmanager
def _open_trial(
    info: det.ClusterInfo, experiment: Experiment[Any]
) -> Iterator[tuple[pytorch.PyTorchTrial, pytorch.PyTorchTrialContext]]:
    """The trial and its context, made with the experiment's seed instead of the trial's seed."""
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    info.trial.trial_seed = experiment.seed
    frequency = experiment.aggregation_frequency
    hparams = dict(experiment.hyperparameters)
    with task_context(hparams, frequency) as context:
        set_averaging(context, experiment)
        noted: dict[str, Any] = {"seed": experiment.seed, "failure": None}
        if experiment.amp is not None:
            noted["precision"] = experiment.amp.precision.value
            noted["init_scale"] = experiment.amp.init_scale
        note_on_master(context, **noted)
        yield trial_of(experiment, context), context


def _report(train: core.TrainContext, finding: Finding, batches: int) -> None:
    for scale in range(1, finding.shown_scales()[-1] + 1):
        predicted = finding.at(scale)
        shares = {
            "overflow_share": predicted.overflow_share,
            "flushed_share": predicted.flushed_share,
        }
        train.report_metrics(group="loss_scale", steps_completed=scale, metrics=shares)
    metrics = {
        "window_low_log2": finding.low_log2,
        "window_top_log2": finding.top_log2,
        "window_bits": finding.window_bits,
        "expected_skips_at_default": finding.expected_skips(16),
    }
    if finding.answer_log2 is not None:
        metrics["init_scale_log2"] = finding.answer_log2
    train.report_validation_metrics(steps_completed=batches, metrics=metrics)


if __name__ == "__main__":
    sys.exit(main())
