"""Runs one trial in a process: trains it, or scores or finds its loss scale.

The process is a fork of a server that has imported torch: `det-amp score` of a small
trial takes 7 s of processor time (2026-11-25), nearly all of it for imports. The trial
sends its reports over a connection, and receives after each whether to go on. Its run
folder says how it ended.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from rich.console import Console

from determined_amp.amp.plain_data import Values
from determined_amp.experiment.entrypoint import Task
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.machine import Machine
from determined_amp.finder.found_scale import FILE_NAME
from determined_amp.local.checkpoint_storage import Resume, translating_disk_errors
from determined_amp.local.ending import ending
from determined_amp.local.logs import logging_to
from determined_amp.local.open_trial import open_trial
from determined_amp.local.processes import GoesOn
from determined_amp.local.trainer import train
from determined_amp.runs.folder import (
    RunFolder,
    complete_checkpoints,
    lock,
    read_record,
)
from determined_amp.runs.run import Run, RunState
from determined_amp.trial.determined_private import leave_the_cluster

_processes = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Job:
    """One trial to run."""

    task: Task  # whether to train, score or find
    experiment: Experiment  # the experiment of the trial
    folder: RunFolder  # the run folder; training continues from a checkpoint in it


class TrialProcess:
    """A process that runs one trial.

    Args:
        job: The trial.
        slot: Index among the processes that run at the same time. It selects the GPU.
        workers: Number of processes that run at the same time, and share the
            processors.
    """

    def __init__(self, job: Job, slot: int = 0, workers: int = 1) -> None:
        self._folder = job.folder
        self.slot = slot
        self.connection, theirs = _processes.Pipe()
        # Not a daemon, because daemons may not start loader processes.
        self.process = _processes.Process(
            target=_serve, args=(theirs, job, slot, workers, os.getcwd())
        )
        self.process.start()
        theirs.close()

    def run(self, goes_on: GoesOn) -> Run:
        """Answer the reports of the trial until it ends, and return its record."""
        try:
            with suppress(EOFError, ConnectionError):
                while True:
                    self.connection.send(goes_on(self.connection.recv()))
        except BaseException:
            self.process.kill()
            self.end()
            raise
        return self.end()

    def end(self) -> Run:
        """Close the connection, wait for the process, and return the trial's record.

        The state of the record is `RUNNING` if the process died.
        """
        self.connection.close()
        self.process.join()
        run = read_record(self._folder.path)
        if run.state is not RunState.RUNNING:
            return run
        return dataclasses.replace(
            run, reason=f"its process died with status {self.process.exitcode}"
        )


def _serve(
    connection: Connection, job: Job, slot: int, workers: int, directory: str
) -> None:
    gc.freeze()  # else garbage collection copies every page of the server's imports
    # Ctrl-C reaches every process of the terminal, but only the search may stop its
    # trials.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A comparison may be a task of a cluster, but its trials are not.
    leave_the_cluster()
    # Data loader processes are forks, as in a training without a search. With the fork
    # server they would import everything again, and need data that can be pickled.
    multiprocessing.set_start_method("fork", force=True)
    _share_machine(slot, workers)
    os.chdir(directory)  # multiprocessing goes to the folder where it was imported
    # A process of a killed search may still hold the lock. A trial that leaves after a
    # signal is recorded as stopped.
    with (
        lock(job.folder.shown, "this run", wait=True),
        suppress(KeyboardInterrupt),
    ):
        try:
            with translating_disk_errors(job.folder.path):
                _run(job, connection)
        except Exception as error:  # a failed trial must not end the search
            job.folder.end(*ending(error))


def _share_machine(slot: int, workers: int) -> None:
    """Use this process's share of the processors, and one of the GPUs."""
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    here = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or here).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]


def _run(job: Job, connection: Connection) -> None:
    """Train, score or find, and write what was measured into the folder."""
    experiment, folder = job.experiment, job.folder
    if job.task.verb == "train":
        saved = complete_checkpoints(folder.checkpoints)
        resume = Resume.latest(folder.path) if saved else Resume()
        train(experiment, lambda: folder, resume, _asking(connection))
        return
    folder.forget_metrics_after(0)  # a killed process may have left its report
    folder.describe(experiment, Machine.of_this_process())
    logged = logging_to(folder.log, Console(quiet=True))
    with logged, open_trial(experiment) as opened:
        if job.task.verb == "find":
            answer = opened.find(job.task.batches)
            (folder.path / FILE_NAME).write_text(answer.json_text())
        else:
            metrics = opened.score(job.task.batches)
            line = {"group": "validation", **metrics, "batches": job.task.batches}
            folder.append_metrics(line)
    folder.end(RunState.COMPLETED)


def _asking(connection: Connection) -> GoesOn:
    """A function that sends a report to the search, and returns whether to go on."""

    def goes_on(line: Values) -> bool:
        try:
            connection.send(dict(line))
            return bool(connection.recv())
        except (EOFError, ConnectionError):  # the search was killed
            signal.raise_signal(signal.SIGTERM)
            return True

    return goes_on
