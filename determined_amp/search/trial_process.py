"""The process of one trial of a search: it trains the trial, or scores or finds its loss scale."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from determined_amp.experiment.experiment import parse
from determined_amp.experiment.machine import Machine
from determined_amp.finder.found_scale import FILE_NAME
from determined_amp.local.checkpoint_storage import (
    DiskError,
    Resume,
    complete_checkpoints,
    translating_disk_errors,
)
from determined_amp.local.logs import logging_to
from determined_amp.local.open_trial import open_trial, outcome
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.run_listener import RunListener
from determined_amp.local.trainer import train
from determined_amp.runs.folder import RunFolder
from determined_amp.runs.run import RunState
from determined_amp.search.task import Task, Verb
from determined_amp.trial.determined_private import leave_the_cluster

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Job:
    """One trial to run."""

    task: Task  # whether to train, score or find
    config: Mapping[str, Any]  # its experiment configuration
    folder: Path  # its run folder; a trial with a checkpoint there continues from it


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    # How it ended. `STOPPED` means that it was interrupted, and can continue.
    state: RunState
    # Why it is invalid or failed, or which machine problem interrupted it; else None.
    reason: str | None = None
    epoch_batches: int | None = None  # batches of an epoch; None if it did not train


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

    def result(self, goes_on: Callable[[Mapping[str, Any]], bool]) -> TrialResult | None:
        """The result; None if the process has died.

        Args:
            goes_on: Whether the trial continues after this report, a mapping with `group` and
                `batches`.
        """
        with suppress(EOFError, ConnectionError):
            while isinstance(message := self.connection.recv(), Mapping):
                self.connection.send(goes_on(message))
            result: TrialResult = message
            return result
        return None

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
    result = run_trial(job, TrialListener(connection))
    with suppress(ConnectionError):  # the search was killed
        connection.send(result)


def _share_machine(slot: int, workers: int) -> None:
    """Use this process's share of the processors, and one GPU if there are several."""
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]


def run_trial(job: Job, listener: TrialListener) -> TrialResult:
    """Run one trial to its end, or until it is stopped; its error is a result, too."""
    folder = RunFolder(job.folder)
    with folder.locked(wait=True):  # a process of a killed search may hold it
        try:
            with translating_disk_errors(folder.path):
                _run(job, folder, listener)
        except DiskError as error:
            return TrialResult(RunState.STOPPED, reason=str(error))
        except Exception as error:  # a failed trial must not end the search
            return TrialResult(*outcome(error))
    return listener.result


def _run(job: Job, folder: RunFolder, listener: TrialListener) -> None:
    """Train, score or find, and write what was measured into the folder."""
    experiment = parse(job.config, str(job.config.get("name", "search")))
    if job.task.verb is Verb.TRAIN:
        saved = complete_checkpoints(folder.checkpoints)
        resume = Resume.latest(folder.path) if saved else None
        train(experiment, lambda: folder, resume, [listener], show=False)
        return
    folder.describe(experiment, Machine.of_this_process())
    logged = logging_to(folder.log, Console(quiet=True))
    with logged, open_trial(experiment) as opened:
        if job.task.verb is Verb.FIND:
            answer = opened.find(job.task.batches)
            (folder.path / FILE_NAME).write_text(answer.json_text())
            return
        metrics = opened.score(job.task.batches)
    folder.forget_metrics_after(-1)  # a killed process may have left its report
    line = {"group": "validation", **metrics, "batches": job.task.batches}
    folder.append_metrics(line)
    listener.ask(line)


class TrialListener(RunListener):
    """Sends the reports of a trial to its search, which may stop it.

    Attributes:
        result: How the trial has ended, unless an error ends it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.result = TrialResult(RunState.COMPLETED)

    def on_training(self, first_batch: int, total_batches: int, epoch_batches: int) -> None:
        self.result = replace(self.result, epoch_batches=epoch_batches)

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        self._stop = stop

    def on_report(self, line: Mapping[str, Any]) -> None:
        try:
            goes_on = self.ask(line)
        except (EOFError, ConnectionError):
            self._stop.reason, self._stop.requested = "its search was killed", True
            return
        if not goes_on:
            reason = "stopped early by the search"
            self.result = replace(self.result, state=RunState.PRUNED, reason=reason)
            self._stop.requested = True

    def ask(self, line: Mapping[str, Any]) -> bool:
        """Send a report to the search; whether the trial continues after it.

        Raises:
            EOFError, ConnectionError: if the search was killed.
        """
        self._connection.send(dict(line))
        return bool(self._connection.recv())

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        if stopped and self.result.state is RunState.COMPLETED:
            self.result = replace(self.result, state=RunState.STOPPED)
