"""The command `compare` as one task of a cluster."""

from __future__ import annotations

import shutil

from determined import core

from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import Precision
from determined_amp.cluster import leave_answer, task_info, task_without_trial
from determined_amp.compare.comparable import (
    LEAST_BATCHES,
    ComparisonRequest,
    check_comparable,
)
from determined_amp.compare.runs import ONLY_FP32, ComparisonEnd, compare
from determined_amp.experiment.experiment import experiment_in
from determined_amp.experiment.overrides import in_precision
from determined_amp.report.answer import answer_of


def compare_on_cluster(trial: str | None, request: ComparisonRequest) -> None:
    """Run the comparison as a cluster task. Its log, metrics and checkpoint have the
    answer.

    `trial` is the option `--trial`. A pause takes effect after the answer. If the task
    is then activated, it ends.

    Raises:
        UserError: see `compare`.
    """
    with task_without_trial() as (config, core_context):
        if task_info().latest_checkpoint is not None:
            print("nothing is left to do: the answer is in the checkpoint")
            return
        in_fp32 = in_precision(config, Precision.FP32.value)
        experiment = experiment_in(in_fp32, "experiment", trial=trial)
        check_comparable(experiment, request.batches)
        _leave(core_context, compare(experiment, request))


def _leave(core_context: core.Context, end: ComparisonEnd) -> None:
    """Report the answer to the master, and store the page."""
    batches = LEAST_BATCHES
    speed = 1.0
    # There is no comparison if only fp32 could be trained.
    noted: Values = {"answer": ONLY_FP32, "precision": Precision.FP32.value}
    comparison = end.comparison
    if comparison is not None:
        answer = answer_of(comparison)
        noted = {"answer": answer.text, "precision": answer.precision.value}
        batches = max(run.validated.batches for run in comparison.runs)
        pair = comparison.against_baseline(answer.precision)
        if pair is not None and pair.speed is not None:
            noted["verdict"] = pair.metric.judgement.value
            speed = round(pair.times_as_fast, 3)
    times = "" if speed == 1.0 else f": {speed:.1f}x"
    status = f"use {noted['precision']}{times}"
    leave_answer(
        core_context.train, status, batches, {"speed": speed}, **noted, speed=speed
    )
    files = [path for path in end.folder.iterdir() if path.is_file() and path.suffix]
    storage = core_context.checkpoint.store_path({"steps_completed": batches})
    with storage as (stored, _):
        for path in files:
            shutil.copy(path, stored / path.name)
