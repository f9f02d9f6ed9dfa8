"""Examines a trial: a few short runs in Determined's loop, judged together.

`examine` answers `check CONFIG`. Each run trains a few batches in a process of its own,
with a `Recorder`, and sends its `Record` back. Then `judge.py` judges the record of the
run and that of its resume.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from determined import core, pytorch, util
from torch.utils.data import DataLoader

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.rehearse.regions import float16_as
from determined_amp.check.finding import CheckFindings
from determined_amp.check.judge import judge_record
from determined_amp.check.record import Record, where_raised
from determined_amp.check.recorder import OVERFLOWS, STEPS, Recorder
from determined_amp.check.scratch import changing_all_in
from determined_amp.check.two_scales import (
    MOST_TRAININGS,
    ScaleComparison,
    WaitingRuns,
)
from determined_amp.experiment.experiment import Experiment
from determined_amp.local.open_trial import core_context_of, trial_context
from determined_amp.trial.checkpoint import CheckpointError
from determined_amp.trial.controller import SafeController
from determined_amp.trial.determined_private import (
    aggregation_frequency,
    amp_of,
    controlled_by,
    leave_the_cluster,
    shorten_epoch,
)
from determined_amp.trial.make import trial_of
from determined_amp.trial.random_state import random_state, restore_random_state

# The most processes: one run, one without overflows, its resume, and the trainings that
# compare two loss scales.
RUNS = 4

ASK_FOR_AMP = (
    "--precision amp_fp16, or hyperparameters.amp.precision: amp_fp16 in the YAML, "
    "examines this trial with AMP"
)

# Steps in an epoch, and batches in a validation.
_EPOCH_STEPS, _VALIDATION_BATCHES = 4, 4

# Steps before the checkpoint, which must not be at the end of an epoch, and steps of a
# resumed run.
_STEPS_BEFORE_SAVE, _RESUMED_STEPS = 10, 2

# Seconds of training after which a run ends with what it has recorded, and the most
# seconds that its process may take.
_TRAINING_SECONDS, PATIENCE = 60.0, 300
# Seconds of a training that is compared, so that all of them and their ends fit.
_COMPARED_SECONDS = PATIENCE / MOST_TRAININGS - 10.0
# Seconds that its process has to send the record and to end.
_PARTING_SECONDS = 30

T = TypeVar("T")

_ENTERED = ExitStack()  # contexts that the process of a run stays in


@dataclass(frozen=True)
class Probe:
    """What one run does."""

    experiment: Experiment
    folder: Path  # for the checkpoint; a resume finds it there
    overflows: tuple[int, ...] = OVERFLOWS  # windows that overflow, from 0
    resumes: bool = False  # whether it resumes from the checkpoint in `folder`


def examine(
    experiment: Experiment,
    notify: Callable[[str], None],
    run: Callable[[Probe], Record] | None = None,
) -> CheckFindings:
    """Examine the trial of an experiment.

    Args:
        experiment: The experiment.
        notify: Called with a sentence before each run.
        run: Runs a probe; by default in a fresh process, and two loss scales are
            compared in another.

    Raises:
        UserError: if the configuration is wrong, or the trial cannot be made or run
            here.
    """
    with TemporaryDirectory() as folder:
        probe = Probe(experiment, Path(folder))
        record, resumed = _runs(probe, run or _run_afresh, notify)
        if record.scales_the_loss and not record.error and run is None:
            notify("twice in float32, at two loss scales")
            steps = len(record.of("step"))
            try:
                record.at_two_scales = _afresh(_compared, probe, steps)
            except UserError as error:
                record.at_two_scales = ScaleComparison(0, None, reason=str(error))
    findings = judge_record(record, resumed)
    if findings.trained and not (findings.amp or record.scalers):
        findings.notes.append(ASK_FOR_AMP)
    return findings


def _runs(
    probe: Probe, run: Callable[[Probe], Record], notify: Callable[[str], None]
) -> tuple[Record, Record | None]:
    """Run a trial, and its resume if it saved a checkpoint; return both records."""
    notify("training a few batches, two of them with an overflow if it scales its loss")
    record = run(probe)
    if record.error_after_overflow:
        notify("once more, since it raised an error after an overflow")
        probe = replace(probe, overflows=())
        record = run(probe)
    record.without_overflows = not probe.overflows
    if not any(probe.folder.glob("*/state_dict.pth")):
        return record, None
    notify("resuming from the checkpoint")
    return record, run(replace(probe, resumes=True))


def _run_afresh(probe: Probe) -> Record:
    """Run a probe in a process of its own.

    Raises:
        UserError: if the trial cannot be run.
    """
    return _afresh(_run, probe)


def _afresh(job: Callable[..., T], probe: Probe, *others: Any) -> T:
    """Call a function in a process of its own, whose output is dropped.

    What the trial writes goes to the folder of the probe.

    Raises:
        UserError: if the process died.
    """
    processes = multiprocessing.get_context("forkserver")
    entered = os.getcwd(), str(probe.folder)
    with ProcessPoolExecutor(1, processes, _enter, entered) as pool:
        try:
            return pool.submit(job, probe, *others).result()
        except BrokenProcessPool:
            raise UserError(
                f"a run of the trial died, or took more than {PATIENCE} s; give it "
                "less data"
            ) from None


def _enter(directory: str, folder: str) -> None:
    """Prepare the process of a run."""
    signal.alarm(PATIENCE)  # ends the process
    os.chdir(directory)
    sys.path.insert(0, directory)
    leave_the_cluster()  # `check` may be a task there, but its runs are not
    # data loaders fork, as in a training
    multiprocessing.set_start_method("fork", force=True)
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nothing, stream.fileno())
    _ENTERED.enter_context(changing_all_in(folder))


def _run(probe: Probe) -> Record:
    """Run a probe, and turn any error into a `UserError`, which can be sent."""
    try:
        return run_here(probe)
    except UserError as error:
        raise UserError(str(error)) from None
    except BaseException:  # some errors of a trial cannot be pickled
        said = traceback.format_exc().strip().splitlines()[-1]
        raise UserError(f"a run of the trial failed: {said}") from None
    finally:
        signal.alarm(_PARTING_SECONDS)  # a thread of the trial may never end


def _compared(probe: Probe, steps: int) -> ScaleComparison:
    """Compare trainings of a probe in float32 at two loss scales."""
    with closing(WaitingRuns(partial(_train_again, probe))) as again:
        return again.compare(steps, _COMPARED_SECONDS)


def _train_again(probe: Probe) -> None:
    """Train without a recorder that watches, and with a folder of its own."""
    with TemporaryDirectory(dir=probe.folder) as folder:
        again = replace(probe, folder=Path(folder))
        with _core_context(again) as core_context:
            _train(again, Recorder(()), core_context)


def run_here(probe: Probe) -> Record:
    """Run a probe in this process, which cannot be used for another run.

    Raises:
        UserError: if the configuration is wrong, or the trial cannot be made on this
            machine.
    """
    recorder = Recorder(probe.overflows, looks_anyway=not probe.resumes)
    recorder.record.determined = True
    recorder.record.lacks_cuda = not torch.cuda.is_available()  # `context.device` asks
    try:
        with recorder.watching(), _core_context(probe) as core_context:
            _train(probe, recorder, core_context)
    except BaseException as error:  # Determined has errors that are no `Exception`
        is_the_users = isinstance(error, (UserError, KeyboardInterrupt))
        if is_the_users and not isinstance(error, CheckpointError):
            raise
        # The record has the error of the trial.
    return recorder.record


def _train(probe: Probe, recorder: Recorder, core_context: core.Context) -> None:
    """Train a few batches, from the first run's checkpoint if the probe resumes."""
    experiment = probe.experiment.loaded()
    try:
        context = trial_context(core_context, experiment)
        trial = trial_of(experiment, context)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__} at {where_raised(error)}: {one_line(error)}"
        raise UserError(f"the trial cannot be made on this machine: {what}") from error
    amp = amp_of(context)
    if amp is not None:  # its guard would end a run that overflows
        amp.guard.enabled = False
    aggregation = aggregation_frequency(context)
    batches, checkpoint = 4 * STEPS * aggregation, None
    if probe.resumes:
        saved = next(probe.folder.glob("*/state_dict.pth"))
        batches, checkpoint = 1_000_000, saved.parent.name
    with (
        controlled_by(partial(ExaminedController, probe, recorder)),
        patched(util, "write_user_code", lambda *given: None),  # in a checkpoint
    ):
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(batches),
            reporting_period=pytorch.Batch(1),
            validation_period=pytorch.Batch(_EPOCH_STEPS * aggregation),
            checkpoint_period=pytorch.Batch(_STEPS_BEFORE_SAVE * aggregation),
            checkpoint_policy="none",
            latest_checkpoint=checkpoint,
        )


def _core_context(probe: Probe) -> core.Context:
    reports = core.DummyTrainContext(probe.folder / "tensorboard")
    return core_context_of(reports, probe.folder)


class ExaminedController(SafeController):
    """Determined's loop with short epochs, which ends after enough steps.

    Args:
        probe: What the run does.
        recorder: The recorder of the run.
        fitted: The arguments of `Trainer.fit`.
    """

    def __init__(self, probe: Probe, recorder: Recorder, **fitted: Any) -> None:
        super().__init__(**fitted)
        self._probe = probe
        self._recorder = recorder
        self._began = time.monotonic()

    def _set_data_loaders(self) -> None:
        super()._set_data_loaders()
        shorten_epoch(self.context, _EPOCH_STEPS * aggregation_frequency(self.context))
        # Repeat the batches: Determined only repeats its own kind of loader.
        again = itertools.repeat(self.training_loader)
        self.training_loader: Any = itertools.chain.from_iterable(again)

    def _run(self) -> None:
        super()._run()
        if not self._probe.resumes:
            self._compare_metrics()

    def _train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Metrics:
        recorder = self._recorder
        if self._probe.resumes and not recorder.record.batches:
            recorder.take_state("resumed")
        recorder.begin_batch(batch)
        try:
            metrics: Metrics = super()._train_batch(batch, epoch_idx, batch_idx)
        finally:
            recorder.end_batch()
        wanted = _RESUMED_STEPS if self._probe.resumes else STEPS
        enough = max(recorder.record.steps_of_each, default=0) >= wanted
        if enough or time.monotonic() - self._began > _TRAINING_SECONDS:
            self.context.set_stop_requested(True)
        return metrics

    def _on_epoch_end(self, epoch_idx: int) -> None:
        super()._on_epoch_end(epoch_idx)
        self._recorder.record.epochs += 1

    def _validate(self) -> Metrics:
        if self._probe.resumes:
            assert self.state
            self.state.last_val = self.state.batches_trained
            return {}
        own = DataLoader.__iter__

        def few(loader: Any) -> Any:
            return itertools.islice(own(loader), _VALIDATION_BATCHES)

        with patched(DataLoader, "__iter__", few):
            return super()._validate()

    def _checkpoint(self, already_exiting: bool) -> None:
        assert self.state
        record = self._recorder.record
        if not self._probe.resumes and not record.saved:
            record.saved = True
            self._recorder.take_state("saved")
            super()._checkpoint(already_exiting)
        self.state.last_ckpt = self.state.batches_trained

    def _compare_metrics(self) -> None:
        """Validate the same weights in the trial's precision and in float32."""
        record = self._recorder.record
        if not record.regions_of_validation:
            return
        seen, before = len(record.events), random_state(0)
        reports: list[dict[str, Any]] = []
        for dtype in (None, None, torch.float32):
            restore_random_state(before, 0)
            # A trial that casts by hand may not run in float32.
            with suppress(Exception), float16_as(dtype):
                reports.append(self._validate())
        del record.events[seen:]
        if len(reports) < 3:
            return
        as_is, again, exact = reports
        for name, value in as_is.items():
            # Some metrics draw random numbers without a seed, and differ each time. NaN
            # must compare as equal here.
            draws = str(value) != str(again.get(name))
            if util.is_numerical_scalar(value) and name in exact and not draws:
                record.metrics[name] = float(value), float(exact[name])
