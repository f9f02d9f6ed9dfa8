"""Short pilots of a trial, each in its own process, for the batch time and the loss scale."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from determined_amp.experiment.amp_settings import Precision
from determined_amp.finder.advice import FILE_NAME, FoundScale
from determined_amp.runs.folder import RunFolder, read_metrics
from determined_amp.search.run_trial import Job, Outcome, TrialResult, Validation
from determined_amp.search.task import Task, Verb
from determined_amp.search.workers import Worker

# Length and reporting period in batches. The first ten batches of a process are not timed.
BATCHES, REPORTING_PERIOD = 20, 4

# How many batches the finder uses.
FINDER_BATCHES = 4

# Seconds until a pilot is asked to stop, and then until it is killed.
_PATIENCE, _GRACE = 40.0, 40.0


@dataclass(frozen=True)
class Pilot:
    """A short training in one precision.

    Args:
        precision: The precision.
        seconds_per_batch: Time of a batch, excluding the first batches of the process.
        overhead: Seconds for everything else: the start of the process, the audit, one validation,
            one checkpoint.
        epoch_batches: Batches of an epoch; None if it is not known.
        failure: Why it cannot be trained; the times then mean nothing. None if it can.
    """

    precision: Precision
    seconds_per_batch: float = 0.0
    overhead: float = 0.0
    epoch_batches: int | None = None
    failure: str | None = None


def train_a_little(config: Mapping[str, Any], precision: Precision, folder: Path) -> Pilot:
    """Train `BATCHES` batches, or as many as fit into a minute.

    Args:
        config: The experiment in this precision, with this length and `REPORTING_PERIOD`.
        precision: The precision.
        folder: A new run folder.
    """
    began = time.monotonic()
    result = _run(Job(Task(Verb.TRAIN), config, RunFolder(folder).path))
    wall = time.monotonic() - began
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a pilot is never continued
    blocked = result.outcome is Outcome.INTERRUPTED and result.reason
    if blocked or result.outcome in (Outcome.FAILED, Outcome.INVALID):
        return Pilot(precision, failure=result.reason or "it failed")
    training = [line for line in read_metrics(folder / "metrics.jsonl") if _has_speed(line)]
    batch_size = int(config["hyperparameters"]["global_batch_size"])
    if training:
        seconds = batch_size / training[-1]["samples_per_second"]
        return Pilot(precision, seconds, max(wall - BATCHES * seconds, 0.0), result.epoch_batches)
    trained = [line["batches"] for line in read_metrics(folder / "metrics.jsonl")]
    return Pilot(precision, wall / max([*trained, 1]), 0.0, result.epoch_batches)


def find_the_scale(config: Mapping[str, Any], folder: Path) -> FoundScale | str:
    """The initial loss scale, or why none can be found.

    Args:
        config: The experiment, in `amp_fp16`.
        folder: A new run folder.
    """
    run_folder = RunFolder(folder)
    result = _run(Job(Task(Verb.FIND, batches=FINDER_BATCHES), config, run_folder.path))
    if result.outcome is not Outcome.COMPLETE:
        return result.reason or "it was stopped"
    return FoundScale.read(folder / FILE_NAME)


def _has_speed(line: Mapping[str, Any]) -> bool:
    return line["group"] == "training" and bool(line.get("samples_per_second"))


def _run(job: Job) -> TrialResult:
    with _worker() as worker:
        worker.run(job)
        ends, asked = time.monotonic() + _PATIENCE, False
        while True:
            if not connection.wait([worker.connection], max(ends - time.monotonic(), 0.0)):
                if asked:
                    return TrialResult(
                        Outcome.FAILED,
                        reason=f"{REPORTING_PERIOD} batches take more than "
                        f"{_PATIENCE + _GRACE:.0f} s",
                    )
                worker.process.terminate()
                ends, asked = time.monotonic() + _GRACE, True
                continue
            message = worker.receive()
            if isinstance(message, Validation):
                worker.answer(go_on=True)
            elif message is None:
                return TrialResult(Outcome.FAILED, reason="its process died")
            else:
                return message


@contextmanager
def _worker() -> Iterator[Worker]:
    worker = Worker(0, 1)
    try:
        yield worker
    finally:
        worker.close(kill=True)
