"""Runs one trial of a search on this machine: trains it, or scores or finds its loss scale.

A worker process runs several trials, one after the other. So on a CPU `peak_memory_mib` is the peak
over all trials of the process so far. Only in a comparison does each trial have its own process.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import determined as det
import torch
from rich.console import Console

from determined_amp.amp.errors import UserError
from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.finder.advice import FILE_NAME
from determined_amp.local.checkpoint_storage import (
    DiskError,
    complete_checkpoints,
    disk_errors_told,
)
from determined_amp.local.logs import logging_to
from determined_amp.local.open_trial import open_trial
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.run import Resume
from determined_amp.local.run import train as train_here
from determined_amp.local.run_listener import RunListener, after_first_batch
from determined_amp.runs.folder import RunFolder
from determined_amp.runs.run import RunState
from determined_amp.search.searcher_settings import check_lengths
from determined_amp.search.task import Task, Verb, check_score
from determined_amp.trial.frozen import find_in_trial, score


@dataclass(frozen=True)
class Job:
    """One trial to run."""

    task: Task  # whether to train, score or find
    config: Mapping[str, Any]  # its experiment configuration
    folder: Path  # its run folder; a trial with a checkpoint there continues from it


@dataclass(frozen=True)
class Validation:
    """A validation of a running trial."""

    batches: int  # number of batches trained before it
    metrics: Mapping[str, float]  # its finite metrics, by name


@dataclass(frozen=True)
class FirstBatch:
    """The first batch of a trial was trained; its start is over."""


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    # How it ended. `STOPPED` means that it was interrupted, and can continue.
    state: RunState
    # Why it is invalid or failed, or which machine problem interrupted it; else None.
    reason: str | None = None
    epoch_batches: int | None = None  # batches of an epoch; None if it did not train
    # Time of a batch between the first one and the last training report; None if there is no such
    # report.
    seconds_per_batch: float | None = None


# Called with every validation of a running trial; returns whether the trial continues.
GoOn = Callable[[Validation], bool]


def check_trial(experiment: Experiment[Any], task: Task) -> None:
    """Check that a trial of a search can be run.

    Raises:
        ConfigError: naming every mistake.
    """
    if task.verb is Verb.SCORE:
        check_score(experiment)
    else:
        check_lengths(experiment)


def run_trial(job: Job, go_on: GoOn, on_first_batch: Callable[[], None]) -> TrialResult:
    """Run one trial to its end, or until it is stopped.

    Args:
        job: The trial.
        go_on: Called with every validation; returns whether the trial continues.
        on_first_batch: Called when the first batch was trained.

    Returns:
        How it ended; an error of the trial is a result, too.
    """
    gc.collect()
    torch.cuda.empty_cache()
    folder = RunFolder(job.folder)
    with folder.locked(wait=True):  # a worker of a killed search may hold it
        try:
            listener = _SearchListener(go_on, on_first_batch)
            with disk_errors_told(folder.path):
                _run(job, folder, listener)
        except SystemExit as exit_error:  # Determined's context raises it for an InvalidHP
            if not isinstance(exit_error.__context__, det.InvalidHP):
                raise
            return TrialResult(RunState.INVALID, reason=str(exit_error.__context__))
        except Exception as error:  # a failed trial must not end the search
            if isinstance(error, DiskError):
                return TrialResult(RunState.STOPPED, reason=str(error))
            if isinstance(error, UserError):
                return TrialResult(RunState.FAILED, reason=str(error))
            return TrialResult(RunState.FAILED, reason=f"{type(error).__name__}: {error}")
    return TrialResult(
        listener.state,
        reason="stopped early by the search" if listener.state is RunState.PRUNED else None,
        epoch_batches=listener.epoch_batches,
        seconds_per_batch=listener.seconds_per_batch,
    )


def _run(job: Job, folder: RunFolder, listener: _SearchListener) -> None:
    experiment = parse(job.config, str(job.config.get("name", "search")))
    if job.task.verb is Verb.SCORE:
        _score(experiment, job.task.batches, folder, listener.go_on)
        return
    if job.task.verb is Verb.FIND:
        _find(experiment, job.task.batches, folder, listener.on_first_batch)
        return
    train_here(
        experiment,
        lambda: folder,
        _resume(folder),
        listeners=[listener],
        show=False,
    )


def _resume(folder: RunFolder) -> Resume | None:
    return Resume.latest(folder.path) if complete_checkpoints(folder.checkpoints) else None


def _score(experiment: Experiment[Any], batches: int, folder: RunFolder, go_on: GoOn) -> None:
    folder.describe(experiment)
    with (
        logging_to(folder.log, Console(quiet=True)),
        open_trial(experiment.config, experiment.name) as opened,
    ):
        metrics = score(opened.trial, opened.context, batches)
    folder.forget_metrics_after(-1)  # a killed process may have left its report
    folder.append_metrics({"group": "validation", **metrics, "batches": batches})
    go_on(Validation(batches, _finite(metrics)))


def _find(
    experiment: Experiment[Any],
    batches: int,
    folder: RunFolder,
    on_first_batch: Callable[[], None],
) -> None:
    folder.describe(experiment)
    with (
        logging_to(folder.log, Console(quiet=True)),
        open_trial(experiment.config, experiment.name) as opened,
    ):
        after_first_batch(opened.trial, on_first_batch)
        answer = find_in_trial(experiment.name, opened.trial, opened.context, batches)
    answer.write(folder.path / FILE_NAME)


class _SearchListener(RunListener):
    """After every validation, asks the search whether the trial continues, and stops it if not.

    Args:
        go_on: Asks the search.
        notify: Called when the first batch was trained.

    Attributes:
        state: How the trial ended.
        epoch_batches: Batches of an epoch; None before the training.
        seconds_per_batch: See `TrialResult`.
    """

    def __init__(self, go_on: GoOn, notify: Callable[[], None]) -> None:
        self.go_on = go_on
        self._notify = notify
        self._first_batch_at = 0.0
        self.seconds_per_batch: float | None = None
        self.state = RunState.COMPLETED
        self.epoch_batches: int | None = None

    def on_epoch_length(self, batches: int) -> None:
        self.epoch_batches = batches

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        self._stop = stop

    def on_first_batch(self) -> None:
        self._first_batch_at = time.monotonic()
        self._notify()

    def on_report(self, line: Mapping[str, Any]) -> None:
        if line["group"] == "training" and line["batches"] > 1:
            seconds = time.monotonic() - self._first_batch_at
            self.seconds_per_batch = seconds / (line["batches"] - 1)
        if line["group"] != "validation":
            return
        try:
            continues = self.go_on(Validation(line["batches"], _finite(line)))
        except SystemExit as search_gone:
            self._stop.reason, self._stop.requested = str(search_gone), True
            raise
        if not continues:
            self.state = RunState.PRUNED
            self._stop.requested = True

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        if stopped and self.state is RunState.COMPLETED:
            self.state = RunState.STOPPED


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a report, which can be compared and stored in a database."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
