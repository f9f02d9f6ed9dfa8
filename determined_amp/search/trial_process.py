"""The process of one trial of a search: it trains the trial, or scores or finds its loss scale."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.experiment.machine import Machine
from determined_amp.finder.advice import FILE_NAME
from determined_amp.local.checkpoint_storage import (
    DiskError,
    Resume,
    complete_checkpoints,
    translating_disk_errors,
)
from determined_amp.local.logs import logging_to, surviving_closed_output
from determined_amp.local.open_trial import open_trial, outcome
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.run import train
from determined_amp.local.run_listener import RunListener, after_first_batch
from determined_amp.runs.folder import RunFolder
from determined_amp.runs.run import Report, RunState
from determined_amp.search.study import StudyError, goes_on_after, storing
from determined_amp.search.task import Task, Verb
from determined_amp.trial.determined_0_38 import leave_the_cluster

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Job:
    """One trial to run."""

    task: Task  # whether to train, score or find
    config: Mapping[str, Any]  # its experiment configuration
    folder: Path  # its run folder; a trial with a checkpoint there continues from it
    # The folder of its search, whose study gets its validations; None for a trial without a search.
    search: Path | None = None
    number: int = 0  # its number in the search


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


class TrialProcess:
    """A process that runs one trial.

    Args:
        job: The trial.
        slot: Index of the process among those that run at the same time, which chooses its GPU.
        workers: Number of processes that run at the same time, and share the processors.
    """

    def __init__(self, job: Job, slot: int = 0, workers: int = 1) -> None:
        self.slot = slot
        self.connection, theirs = _processes.Pipe()
        # Not a daemon, because daemons may not start loader processes.
        self.process = _processes.Process(
            target=_serve, args=(theirs, job, slot, workers, os.getcwd())
        )
        self.process.start()
        theirs.close()

    def receive(self) -> FirstBatch | TrialResult | None:
        """The next message; None if the process has died."""
        try:
            message: FirstBatch | TrialResult = self.connection.recv()
        except (EOFError, ConnectionError):
            return None
        return message

    def result(self) -> TrialResult | None:
        """The result; None if the process has died."""
        message = self.receive()
        while isinstance(message, FirstBatch):
            message = self.receive()
        return message

    def close(self, *, kill: bool = False) -> int | None:
        """End the process, and return its exit status."""
        self.connection.close()
        if kill:
            self.process.kill()
        self.process.join()
        return self.process.exitcode


def _serve(connection: Connection, job: Job, slot: int, workers: int, directory: str) -> None:
    gc.freeze()  # else a collection would copy every page of the server's imports
    # Ctrl-C reaches every process of the terminal, but only the search may stop its trials.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_the_cluster()  # the comparison itself may be a task of one, but its trials are not
    # Data loader processes are forks, as in a training without a search. With the fork server they
    # would import everything again, and need data that can be pickled.
    multiprocessing.set_start_method("fork", force=True)
    _share_machine(slot, workers)
    os.chdir(directory)  # multiprocessing goes to the folder where it was imported

    def send(message: FirstBatch | TrialResult) -> None:
        with suppress(ConnectionError):  # the search was killed
            connection.send(message)

    # Nothing is ever sent to this process: what can be received is the end of the search.
    listener = SearchListener(job, lambda: send(FirstBatch()), search_is_gone=connection.poll)
    with surviving_closed_output():
        send(run_trial(job, listener))


def _share_machine(slot: int, workers: int) -> None:
    """Use this process's share of the processors, and one GPU if there are several."""
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]


def run_trial(job: Job, listener: SearchListener) -> TrialResult:
    """Run one trial to its end, or until it is stopped; its error is a result, too."""
    folder = RunFolder(job.folder)
    with folder.locked(wait=True):  # a process of a killed search may hold it
        try:
            with translating_disk_errors(folder.path):
                experiment = parse(job.config, str(job.config.get("name", "search")))
                if job.task.verb is Verb.TRAIN:
                    saved = complete_checkpoints(folder.checkpoints)
                    resume = Resume.latest(folder.path) if saved else None
                    train(experiment, lambda: folder, resume, [listener], show=False)
                else:
                    _measure(experiment, job.task, folder, listener)
        except (DiskError, StudyError) as error:
            return TrialResult(RunState.STOPPED, reason=str(error))
        except Exception as error:  # a failed trial must not end the search
            return TrialResult(*outcome(error))
    return TrialResult(
        listener.state,
        reason="stopped early by the search" if listener.state is RunState.PRUNED else None,
        epoch_batches=listener.epoch_batches,
        seconds_per_batch=listener.seconds_per_batch,
    )


def _measure(
    experiment: Experiment, task: Task, folder: RunFolder, listener: SearchListener
) -> None:
    """Score or find the loss scale of a trial, and write what was measured into its folder."""
    folder.describe(experiment, Machine.of_this_process())
    logged = logging_to(folder.log, Console(quiet=True))
    with logged, open_trial(experiment.config, experiment.name) as opened:
        if task.verb is Verb.FIND:
            after_first_batch(opened.trial, listener.on_first_batch)
            opened.find(task.batches).write(folder.path / FILE_NAME)
            return
        metrics = opened.score(task.batches)
    folder.forget_metrics_after(-1)  # a killed process may have left its report
    line = {"group": "validation", **metrics, "batches": task.batches}
    folder.append_metrics(line)
    listener.goes_on(line)


class SearchListener(RunListener):
    """Gives every validation to the study of the search, which may stop the trial.

    Attributes:
        state: How the trial ended.
        epoch_batches: Batches of an epoch; None before the training.
        seconds_per_batch: See `TrialResult`.
    """

    def __init__(
        self, job: Job, notify: Callable[[], None], search_is_gone: Callable[[], bool]
    ) -> None:
        self._job = job
        self._notify = notify
        self._search_is_gone = search_is_gone
        self._first_batch_at = 0.0
        self.seconds_per_batch: float | None = None
        self.state = RunState.COMPLETED
        self.epoch_batches: int | None = None

    def on_training(self, first_batch: int, total_batches: int, epoch_batches: int) -> None:
        self.epoch_batches = epoch_batches

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        self._stop = stop

    def on_first_batch(self) -> None:
        self._first_batch_at = time.monotonic()
        self._notify()

    def on_report(self, line: Mapping[str, Any]) -> None:
        if line["group"] == "training" and line["batches"] > 1:
            seconds = time.monotonic() - self._first_batch_at
            self.seconds_per_batch = seconds / (line["batches"] - 1)
        if self._search_is_gone():
            self._stop.reason, self._stop.requested = "its search was killed", True
        elif line["group"] == "validation" and not self.goes_on(line):
            self.state = RunState.PRUNED
            self._stop.requested = True

    def goes_on(self, validation: Mapping[str, Any]) -> bool:
        """Store a validation in the study; whether the trial continues after it."""
        if self._job.search is None:
            return True
        report = Report.read(validation["batches"], validation)
        with storing(self._job.search):
            return goes_on_after(self._job.search, self._job.number, report)

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        if stopped and self.state is RunState.COMPLETED:
            self.state = RunState.STOPPED
