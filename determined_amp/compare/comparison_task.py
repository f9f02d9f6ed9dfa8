"""The command `compare` as one task of a cluster, which may be paused."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from determined import core

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import Precision
from determined_amp.cluster import leave_answer, task_info, task_without_trial
from determined_amp.compare.pilots import BATCHES
from determined_amp.compare.runs import (
    ONLY_FP32,
    ComparisonEnd,
    ComparisonPaused,
    compare,
    ended_runs,
    go_on,
    planned_runs,
)
from determined_amp.experiment.failures import MISSING_BATCH_SIZE
from determined_amp.runs.folder import fresh_folder
from determined_amp.search.search_folder import read_config, read_search
from determined_amp.trial.notes import show_status

# In the checkpoint of a paused task: the folder of its comparison.
_FOLDER = "comparison"


def compare_on_cluster(options: Namespace) -> None:
    """Run the comparison as a cluster task; log, metrics and checkpoint have the
    answer.

    A task that is paused stops at the next report of a run, and goes on there when it
    is activated.

    Raises:
        UserError: see `compare`.
    """
    with task_without_trial() as (config, core_context):
        if config["hyperparameters"].get("global_batch_size") is None:
            raise ConfigError("experiment", [MISSING_BATCH_SIZE])
        is_paused = core_context.preempt.should_preempt
        saved = task_info().latest_checkpoint
        try:
            if saved is None:
                end = compare(config, "experiment", options, is_paused)
            else:
                name = f"compare-{config.get('name')}"
                folder = _left_by_a_pause(core_context.checkpoint, saved, name)
                if folder is None:
                    print("nothing is left to do: the answer is in the checkpoint")
                    return
                end = go_on(folder, read_config(folder), is_paused)
        except ComparisonPaused as paused:
            _keep(core_context, paused.folder)
            return
        _leave(core_context, end)


def _left_by_a_pause(
    checkpoints: core.CheckpointContext, saved: str, name: str
) -> Path | None:
    """The comparison that an earlier process of this task kept; None for its answer,
    after which it was paused, or failed.
    """
    with checkpoints.restore_path(saved) as stored:
        if not (stored / _FOLDER).is_dir():
            return None
        folder = fresh_folder(Path("runs"), name)
        shutil.copytree(stored / _FOLDER, folder, dirs_exist_ok=True)
    print(f"going on: {_so_far(folder)}", flush=True)
    return folder


def _keep(core_context: core.Context, folder: Path) -> None:
    """Store a paused comparison; of the runs that have ended only their numbers are
    needed.
    """
    runs = read_search(folder)
    for run in ended_runs(runs):
        shutil.rmtree(Path(run.name) / "checkpoints", ignore_errors=True)
    trained = sum(run.trained_batches for run in runs.runs)
    with core_context.checkpoint.store_path({"steps_completed": trained}) as (
        stored,
        _,
    ):
        shutil.copytree(folder, stored / _FOLDER)
    paused = f"paused: {_so_far(folder)}"
    print(f"{paused}; an activation goes on with the others", flush=True)
    show_status(core_context.train, paused)


def _so_far(folder: Path) -> str:
    return (
        f"{len(ended_runs(read_search(folder)))} of {planned_runs(folder)} runs are"
        " finished"
    )


def _leave(core_context: core.Context, end: ComparisonEnd) -> None:
    """Report the answer to the master, and store the page."""
    batches = BATCHES
    speed = 1.0
    # There is no report if only fp32 could be trained.
    noted: Values = {"answer": ONLY_FP32, "precision": Precision.FP32.value}
    if end.report is not None:
        comparison = end.report.comparison
        answer = end.report.answer
        noted = {"answer": answer.text, "precision": answer.precision.value}
        batches = max(run.batches for run in comparison.runs)
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
    with core_context.checkpoint.store_path({"steps_completed": batches}) as (
        stored,
        _,
    ):
        for path in files:
            shutil.copy(path, stored / path.name)
