"""Short pilots of a trial, each in its own process, for the batch time and the loss scale."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.amp.settings import Precision
from determined_amp.finder.found_scale import FILE_NAME, FoundScale
from determined_amp.runs.folder import RunFolder, read_metrics
from determined_amp.runs.run import RunState
from determined_amp.search.task import Task, Verb
from determined_amp.search.trial_process import Job, Message, TrialProcess, TrialResult

# Length and reporting period in batches. The first ten batches of a process are not timed.
BATCHES, REPORTING_PERIOD = 20, 4

# How many batches the finder uses.
FINDER_BATCHES = 4

# Seconds after the first batch until a training is asked to stop, and then until it is killed.
_PATIENCE, _GRACE = 40.0, 40.0

# Seconds that the finder may take after its first batch.
_FINDER = 80.0

# Seconds until the first batch: data sets, tokenizers, compilation, a busy machine.
_START = 600.0

# Seconds until the start of a pilot is said to be slow, and between the lines that say so.
_SLOW_START = 10.0, 60.0


@dataclass(frozen=True)
class Pilot:
    """A short training in one precision."""

    precision: Precision
    seconds_per_batch: float = 0.0  # time of a batch, excluding the first batches of the process
    # Seconds for everything else: the start of the process, the data, the audit, one validation,
    # one checkpoint.
    overhead: float = 0.0
    epoch_batches: int | None = None  # batches of an epoch; None if it is not known
    # Why it cannot be trained; the times then mean nothing. None if it can.
    failure: str | None = None


def train_briefly(
    config: Mapping[str, Any], precision: Precision, folder: Path, log: Callable[[str], None]
) -> Pilot:
    """Train `BATCHES` batches, or as many as fit into 40 seconds after the first one.

    Args:
        config: The experiment in this precision, with this length and `REPORTING_PERIOD`.
        precision: The precision.
        folder: The run folder to make.
        log: Called with a sentence while the first batch is awaited.
    """
    began = time.monotonic()
    job = Job(Task(Verb.TRAIN), config, RunFolder(folder).path)
    too_slow = f"{REPORTING_PERIOD} batches take more than {_PATIENCE + _GRACE:.0f} s"
    result = _run(job, precision.value, _PATIENCE, too_slow, log)
    wall = time.monotonic() - began
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a pilot is never continued
    blocked = result.state is RunState.STOPPED and result.reason
    if blocked or result.state.is_failure:
        return Pilot(precision, failure=result.reason or "it failed")
    lines = list(read_metrics(folder / "metrics.jsonl"))
    training = (line for line in lines if line["group"] == "training")
    speeds = [speed for line in training if (speed := line.get("samples_per_second"))]
    if speeds:
        seconds = int(config["hyperparameters"]["global_batch_size"]) / speeds[-1]
    elif result.seconds_per_batch is not None:
        seconds = result.seconds_per_batch
    else:
        return Pilot(precision, failure="it ended before its first report")
    trained = max(line["batches"] for line in lines)
    return Pilot(precision, seconds, max(wall - trained * seconds, 0.0), result.epoch_batches)


def find_the_scale(
    config: Mapping[str, Any], folder: Path, log: Callable[[str], None]
) -> FoundScale | str:
    """The initial loss scale of an experiment in `amp_fp16`, or why none can be found.

    See `train_briefly` for the arguments.
    """
    job = Job(Task(Verb.FIND, batches=FINDER_BATCHES), config, RunFolder(folder).path)
    too_slow = f"the finder took more than {_FINDER:.0f} s after its first batch"
    result = _run(job, "the finder", _FINDER, too_slow, log)
    if result.state is not RunState.COMPLETED:
        return result.reason or "it was stopped"
    return FoundScale.read(folder / FILE_NAME)


def _run(
    job: Job, name: str, patience: float, too_slow: str, log: Callable[[str], None]
) -> TrialResult:
    """Run a job in a process of its own; its clock begins with its first batch.

    Args:
        job: The job.
        name: The job whose first batch is awaited.
        patience: Seconds after the first batch until the job is asked to stop.
        too_slow: The reason of its failure if it then has no result.
        log: Called with a sentence while the first batch is awaited.
    """
    with ExitStack() as stack:
        trial = TrialProcess(job)
        stack.callback(trial.close, kill=True)
        result = _await_first_batch(trial, name, log) or _result(trial, patience)
        if result is not None:
            return result
        trial.process.terminate()  # a training stops at its next report, the finder at once
        result = _result(trial, _GRACE)
        if result is None or trial.process.exitcode == -signal.SIGTERM:
            return TrialResult(RunState.FAILED, reason=too_slow)
        return result


def _await_first_batch(
    trial: TrialProcess, name: str, log: Callable[[str], None]
) -> TrialResult | None:
    """Wait for the first batch, and log that it is awaited; the result if the job ends before."""
    began, (waited, between) = time.monotonic(), _SLOW_START
    longest = f"{_START / 60:.0f} minutes"
    while True:
        message = _next(trial, began + min(waited, _START))
        if message is not None:
            return message if isinstance(message, TrialResult) else None
        if waited >= _START:
            return TrialResult(RunState.FAILED, reason=f"no batch was trained within {longest}")
        log(
            f"{name}: waiting for the first batch since {waited:.0f} s: data, model and "
            f"compilation may take up to {longest}"
        )
        waited += between


def _result(trial: TrialProcess, seconds: float) -> TrialResult | None:
    """The result of a job that has trained its first batch; None if there is none in time."""
    message = _next(trial, time.monotonic() + seconds)
    return message if isinstance(message, TrialResult) else None


def _next(trial: TrialProcess, ends: float) -> Message | None:
    """The first batch or the result, whichever is next; None if neither comes before `ends`."""
    if not trial.connection.poll(max(ends - time.monotonic(), 0.0)):
        return None
    message = trial.receive()
    if message is None:
        trial.process.join()
        reason = f"its process died with exit status {trial.process.exitcode}"
        return TrialResult(RunState.FAILED, reason=reason)
    return message
