"""Makes a trial on this machine, to find its loss scale or to audit its precision."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import determined as det
import numpy as np
import torch
from determined import core, pytorch

from determined_amp.amp.errors import Problems
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.rehearse.precision_audit import (
    Audit,
    AuditError,
    audit_rehearsal,
)
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.failures import faults_of_the_trial
from determined_amp.experiment.sections import indivisible_batch
from determined_amp.finder.found_scale import FoundScale
from determined_amp.local.checkpoint_storage import Resume, storage_in
from determined_amp.local.ending import InvalidTrialError
from determined_amp.trial.checkpoint import CheckpointError
from determined_amp.trial.determined_private import (
    amp_of,
    average_by_default,
)
from determined_amp.trial.loss_scale import find_in_trial, in_training, score
from determined_amp.trial.make import trial_of


@contextmanager
def around_a_trial() -> Iterator[None]:
    """Return to the working directory after this block, because a trial may leave it.

    See `faults_of_the_trial`. An `InvalidHP` becomes an `InvalidTrialError` before
    Determined's core context turns it into a `SystemExit` without a message.
    """
    here = os.getcwd()
    try:
        with faults_of_the_trial():
            yield
    except det.InvalidHP as error:
        raise InvalidTrialError(str(error)) from error
    finally:
        os.chdir(here)


def trial_context(
    core_context: core.Context, experiment: Experiment, first_batch: int = 0
) -> pytorch.PyTorchTrialContext:
    """Set the seeds, and make the context of a run that has trained `first_batch`
    batches.

    Raises:
        ConfigError: if the batch does not divide among the processes.
    """
    processes = core_context.distributed
    wrong = indivisible_batch(experiment.global_batch_size or 0, processes.size)
    Problems(wrong).raise_from(experiment.name)
    for set_seed in (random.seed, np.random.seed, torch.random.manual_seed):
        set_seed(experiment.seed)
    context = pytorch.PyTorchTrialContext(
        core_context=core_context,
        hparams=copy.deepcopy(dict(experiment.hyperparameters)),
        exp_conf=copy.deepcopy(dict(experiment.config)),
        trial_seed=experiment.seed,
        aggregation_frequency=experiment.aggregation_frequency,
        slots_per_trial=processes.size,
        # Otherwise Determined counts all GPUs of nvidia-smi.
        num_gpus=torch.cuda.device_count(),
        steps_completed=first_batch,
        managed_training=True,
        debug_enabled=False,
    )
    optimizations = experiment.platform.optimizations
    average_by_default(context, optimizations.average_aggregated_gradients)
    return context


@dataclass(frozen=True)
class OpenTrial:
    """A trial that has not trained yet."""

    trial: pytorch.PyTorchTrial
    context: pytorch.PyTorchTrialContext
    experiment: Experiment
    latest_checkpoint: str | None = None  # the argument for `Trainer.fit`

    def find(self, batches: int) -> FoundScale:
        """Find the loss scale on `batches` batches. The trial cannot be used again."""
        return find_in_trial(
            self.experiment.name,
            self.trial,
            self.context,
            batches,
            latest_checkpoint=self.latest_checkpoint,
        )

    def score(self, batches: int) -> Metrics:
        """Score the loss scale on `batches` batches."""
        return score(self.trial, self.context, batches)


@contextmanager
def open_trial(
    experiment: Experiment, checkpoint: Path | None = None
) -> Iterator[OpenTrial]:
    """Make the trial of an experiment, in one process on this machine.

    Args:
        experiment: The experiment, whose trial may not be imported yet.
        checkpoint: A checkpoint to start from, or a run folder, whose newest checkpoint
            is used.

    Raises:
        ConfigError: if the trial cannot be imported, or its own sections are wrong.
        CheckpointError: if there is no checkpoint.
    """
    experiment = experiment.loaded()
    saved = checkpoint and _checkpoint_folder(checkpoint)
    with TemporaryDirectory() as folder:
        reports = core.DummyTrainContext(Path(folder))
        core_context = core_context_of(reports, saved.parent if saved else Path(folder))
        with core_context, around_a_trial():
            context = trial_context(core_context, experiment)
            trial = trial_of(experiment, context)
            yield OpenTrial(trial, context, experiment, saved.name if saved else None)


def audit_here(experiment: Experiment) -> tuple[Audit, Precision | None]:
    """Audit the first batch here, in Determined's loop and without writing files.

    Returns:
        The audit of the batch, and the precision that the trial asks for. The precision
            is None for a trial without a `MixedPrecision`, which is not judged.

    Raises:
        AuditError: if the batch is not computed in the precision that the trial asks
            for.
        ConfigError: if the trial cannot be imported, or its own sections are wrong.
    """
    with open_trial(experiment) as opened:
        context = opened.context
        amp = amp_of(context)
        precision = None if amp is None else amp.settings.precision
        asked = precision or Precision.FP32

        def audit(rehearsals: Sequence[Rehearsal]) -> Audit:
            return audit_rehearsal(rehearsals[0], asked, context.device)

        try:
            return in_training(opened.trial, context, 1, audit), precision
        except AuditError as error:
            if precision is not None:
                raise
            return error.audit, None


def core_context_of(train: core.TrainContext, checkpoints: Path) -> core.Context:
    """A core context of one process.

    Args:
        train: It takes the reports.
        checkpoints: The folder of the checkpoints.
    """
    alone = core.DummyDistributedContext()
    return core.Context(
        checkpoint=core.DummyCheckpointContext(alone, storage_in(checkpoints)),
        distributed=alone,
        train=train,
    )


def _checkpoint_folder(path: Path) -> Path:
    if (path / "state_dict.pth").exists():
        return path.absolute()
    if (path / "checkpoints").is_dir():
        return (path / "checkpoints" / Resume.latest(path).checkpoint).absolute()
    raise CheckpointError(
        f"{path}: got neither a checkpoint (a folder with state_dict.pth) nor a run "
        "folder"
    )
