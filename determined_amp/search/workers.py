"""The worker processes of a search; each runs trials one after the other."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from determined_amp.local.logs import surviving_closed_output
from determined_amp.search.run_trial import FirstBatch, Job, TrialResult, Validation, run_trial
from determined_amp.trial.determined_0_38 import leave_the_cluster

_processes = multiprocessing.get_context("forkserver")


class SearchGoneError(SystemExit):
    """Ends a worker whose search has died."""


class Worker:
    """One worker process.

    Args:
        slot: Index of the worker, from 0, which chooses its GPU.
        workers: Number of workers, which share the processors.
    """

    def __init__(self, slot: int, workers: int) -> None:
        self.slot = slot
        self.connection, theirs = _processes.Pipe()
        # Not a daemon, because daemons may not start loader processes.
        self.process = _processes.Process(target=_serve, args=(theirs, slot, workers, os.getcwd()))
        self.process.start()
        theirs.close()

    def run(self, job: Job) -> None:
        """Start a trial; its messages arrive at `connection`."""
        self.connection.send(job)

    def receive(self) -> FirstBatch | Validation | TrialResult | None:
        """The next message; None if the process has died."""
        try:
            message: FirstBatch | Validation | TrialResult = self.connection.recv()
        except (EOFError, ConnectionError):
            return None
        return message

    def answer(self, *, go_on: bool) -> None:
        """Answer a `Validation`. If the process has died, `receive` returns None."""
        try:
            self.connection.send(go_on)
        except ConnectionError:
            return

    def close(self, *, kill: bool = False) -> int | None:
        """End the process, and return its exit status."""
        self.connection.close()
        if kill:
            self.process.kill()
        self.process.join()
        return self.process.exitcode


def _serve(connection: Connection, slot: int, workers: int, directory: str) -> None:
    gc.freeze()  # what the server has imported: a look at it would copy every page of it
    # Ctrl-C reaches every process of the terminal, but only the search may stop its trials.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    leave_the_cluster()  # the comparison itself may be a task of one, but its trials are not
    # Data loader processes are forks, as in a training without a search. With the fork server they
    # would import everything again, and need data that can be pickled.
    multiprocessing.set_start_method("fork", force=True)
    os.chdir(directory)  # multiprocessing uses the directory in which it was imported
    _share_machine(slot, workers)

    def go_on(validation: Validation) -> bool:
        try:
            connection.send(validation)
            return bool(connection.recv())
        except (EOFError, ConnectionError):
            raise SearchGoneError("the search is gone") from None

    def on_first_batch() -> None:
        with suppress(ConnectionError):
            connection.send(FirstBatch())

    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionError):
            return
        with surviving_closed_output():
            result = run_trial(job, go_on, on_first_batch)
        try:
            connection.send(result)
        except ConnectionError:
            return


def _share_machine(slot: int, workers: int) -> None:
    """Use this worker's share of the processors, and one GPU if there are several."""
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
