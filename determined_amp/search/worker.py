"""Warm processes that run the trials of a search, one after the other.

Importing torch and what it brings along takes 8 s; a process forked from a server that has done so
starts in 0.3 s. The server starts no thread and does not initialise CUDA, so forks can. This module
imports nothing of that itself: whoever starts the server goes on meanwhile.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from determined_amp.search.messages import Ended, Job, Validation

_RUNNER = "determined_amp.search.trial_run"
# Imported by the server. `_dynamo` comes with the first optimizer, tensorboard with the first
# report, scikit-learn with the default data.
_PRELOADED = [_RUNNER, "torch._dynamo", "torch.utils.tensorboard", "sklearn.datasets"]

_processes = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Let the server import, in the background.

    What it imports asks whether there is a GPU, as Determined does. torch asks CUDA itself, and no
    process forked from one that did can use a GPU; by this variable it asks the driver instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    _processes.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


class Worker:
    """One process, and the trial it runs.

    Args:
        slot: Which of the workers it is, from 0; chooses its GPU.
        workers: How many there are; they share the processors.
    """

    def __init__(self, slot: int, workers: int) -> None:
        self.slot = slot
        self.connection, theirs = _processes.Pipe()
        # Not a daemon: those may not start loader processes.
        self.process = _processes.Process(target=_serve, args=(theirs, slot, workers, os.getcwd()))
        self.process.start()
        theirs.close()

    def run(self, job: Job) -> None:
        """Start a trial; its messages come over `connection`."""
        self.connection.send(job)

    def receive(self) -> Validation | Ended | None:
        """The next message; None if the process is gone."""
        try:
            message: Validation | Ended = self.connection.recv()
        except (EOFError, ConnectionError):
            return None
        return message

    def answer(self, *, go_on: bool) -> None:
        """Answer a `Validation`; a process that is gone meanwhile shows in `receive`."""
        try:
            self.connection.send(go_on)
        except ConnectionError:
            return

    def close(self, *, kill: bool = False) -> int | None:
        """End the process; its exit status."""
        self.connection.close()
        if kill:
            self.process.kill()
        self.process.join()
        return self.process.exitcode


def _serve(connection: Connection, slot: int, workers: int, directory: str) -> None:
    # Ctrl-C reaches every process of the terminal: the search decides what becomes of the trials.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.chdir(directory)  # the one of this moment; multiprocessing goes to the one of its import
    runner = importlib.import_module(_RUNNER)
    runner.share_machine(slot, workers)

    def go_on(validation: Validation) -> bool:
        try:
            connection.send(validation)
            return bool(connection.recv())
        except (EOFError, ConnectionError):
            sys.exit("the search is gone")

    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionError):
            return
        ended = runner.run(job, go_on)
        try:
            connection.send(ended)
        except ConnectionError:
            return
