"""Run one trial of a search on this machine: score its loss scale, or train it.

What it reports is what a process of its own would, but for `peak_memory_mib` on a CPU, which is the
peak of the process so far; trials of a comparison do have a process of their own.
"""

from __future__ import annotations

import enum
import fcntl
import gc
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import determined as det
import torch
from rich.console import Console

from determined_amp.config.errors import UserError
from determined_amp.config.experiment import Experiment, parse
from determined_amp.local.checkpoints import complete_checkpoints
from determined_amp.local.folder import RunFolder
from determined_amp.local.logs import logging_to
from determined_amp.local.open_trial import open_trial
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.reports import RunListener
from determined_amp.local.run import Resume
from determined_amp.local.run import train as train_here
from determined_amp.search.compose import compose
from determined_amp.search.scale_metrics import batches_to_score, report_flushed_share, scored
from determined_amp.search.searcher_settings import check_lengths
from determined_amp.search.trial_kind import TrialKind


@dataclass(frozen=True)
class Job:
    """One trial to run.

    Args:
        kind: What it does.
        config: Its experiment configuration.
        folder: Its run folder; a trial that left a checkpoint there goes on from it.
    """

    kind: TrialKind
    config: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Validation:
    """A report of a running trial; answered with whether it is to go on.

    Args:
        batches: Batches trained before it.
        metrics: By name; finite numbers only.
    """

    batches: int
    metrics: Mapping[str, float]


class Outcome(enum.Enum):
    """How a trial ended: to its end, by early stopping, by a signal, or without a result."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    INVALID = "invalid"
    FAILED = "failed"


@dataclass(frozen=True)
class TrialResult:
    """The last word of a trial.

    Args:
        outcome: `INVALID` means that these hyperparameters cannot train.
        training: The last training metrics.
        reason: Why it is invalid or failed.
    """

    outcome: Outcome
    training: Mapping[str, float] | None = None
    reason: str | None = None


# Is told of every validation of a running trial; whether the trial is to go on.
GoOn = Callable[[Validation], bool]


def check_trial(search: Mapping[str, Any], sampled: Mapping[str, Any]) -> Experiment[Any]:
    """The experiment of a trial, if it can be run.

    Raises:
        ConfigError: naming every mistake.
    """
    experiment = parse(compose(search, sampled, Path.cwd()), str(search.get("name", "search")))
    scores = TrialKind.of(search) is TrialKind.SCORE
    (batches_to_score if scores else check_lengths)(experiment)
    return experiment


def run_trial(job: Job, go_on: GoOn) -> TrialResult:
    """Run one trial to its end, or until it is asked to stop.

    Args:
        job: The trial.
        go_on: Is told of every validation, and says whether to go on.

    Returns:
        How it ended; whatever went wrong is in there.
    """
    gc.collect()
    torch.cuda.empty_cache()
    folder = RunFolder(job.folder)
    with _alone_in(folder):
        try:
            outcome = _run(job, folder, go_on)
        except SystemExit as left:  # Determined's context makes one of an InvalidHP
            if not isinstance(left.__context__, det.InvalidHP):
                raise
            return TrialResult(Outcome.INVALID, reason=str(left.__context__))
        except UserError as error:
            return TrialResult(Outcome.FAILED, reason=str(error))
        except Exception as error:  # one trial may not end the search
            with folder.log.open("a") as log:
                log.write(traceback.format_exc())
            return TrialResult(Outcome.FAILED, reason=f"{type(error).__name__}: {error}")
    training = [line for line in folder.read_metrics() if line["group"] == "training"]
    return TrialResult(outcome, training=_finite(training[-1]) if training else None)


def _run(job: Job, folder: RunFolder, go_on: GoOn) -> Outcome:
    experiment = parse(job.config, str(job.config.get("name", "search")))
    if job.kind is TrialKind.SCORE:
        _score(experiment, folder, go_on)
        return Outcome.COMPLETE
    check_lengths(experiment)
    listener = _SearchListener(go_on)
    train_here(
        experiment,
        lambda: folder,
        _resume(folder),
        listeners=[listener],
        show=False,
        # A comparison wants the memory of the training alone, and no twin beside it.
        prepare=report_flushed_share if job.kind is TrialKind.TRAIN else None,
    )
    return listener.outcome


def _resume(folder: RunFolder) -> Resume | None:
    return Resume.latest(folder.path) if complete_checkpoints(folder.checkpoints) else None


def _score(experiment: Experiment[Any], folder: RunFolder, go_on: GoOn) -> None:
    batches = batches_to_score(experiment)
    folder.describe(experiment)
    with (
        logging_to(folder.log, Console(quiet=True)),
        open_trial(experiment.config, experiment.name) as found,
    ):
        metrics = scored(found.trial, found.context, experiment, batches)
    folder.forget_metrics_after(-1)  # of a process that was killed before it could answer
    folder.append_metrics({"group": "validation", **metrics, "batches": batches})
    go_on(Validation(batches, _finite(metrics)))


class _SearchListener(RunListener):
    """After every validation asks the search whether to go on, and stops the run if not.

    Args:
        go_on: That question.

    Attributes:
        outcome: How the trial ended.
    """

    def __init__(self, go_on: GoOn) -> None:
        self._go_on = go_on
        self.outcome = Outcome.COMPLETE

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        self._stop = stop

    def on_report(self, line: Mapping[str, Any]) -> None:
        if line["group"] != "validation":
            return
        if not self._go_on(Validation(line["batches"], _finite(line))):
            self.outcome = Outcome.STOPPED
            self._stop.requested = True

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        if stopped and self.outcome is Outcome.COMPLETE:
            self.outcome = Outcome.INTERRUPTED


@contextmanager
def _alone_in(folder: RunFolder) -> Iterator[None]:
    """Wait until no worker of a search that was killed writes there any more."""
    with (folder.path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a report: these can be compared, and stored in any database."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
