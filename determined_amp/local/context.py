"""Makes Determined's trial context for an experiment, as `pytorch.init` does on a cluster."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from determined import core, pytorch

from determined_amp.experiment.experiment import Experiment, indivisible_batch
from determined_amp.experiment.settings import ConfigError
from determined_amp.trial.determined_0_38 import average_by_default


def trial_context(
    core_context: core.Context, experiment: Experiment[Any], first_batch: int = 0
) -> pytorch.PyTorchTrialContext:
    """Set the seeds, and make the context of a run on this machine.

    Args:
        core_context: Determined's core context of the run.
        experiment: The experiment to run.
        first_batch: Number of batches that earlier processes trained.

    Raises:
        ConfigError: if the batch does not divide among the processes.
    """
    processes = core_context.distributed
    wrong = list(indivisible_batch(experiment.global_batch_size, processes.size))
    if wrong:
        raise ConfigError(experiment.name, wrong)
    for set_seed in (random.seed, np.random.seed, torch.random.manual_seed):
        set_seed(experiment.seed)
    return make_context(
        core_context,
        experiment,
        exp_conf=copy.deepcopy(dict(experiment.config)),
        trial_seed=experiment.seed,
        slots_per_trial=processes.size,
        num_gpus=torch.cuda.device_count(),  # Determined would count all GPUs of nvidia-smi
        steps_completed=first_batch,
    )


def make_context(
    core_context: core.Context,
    experiment: Experiment[Any],
    *,
    steps_completed: int = 0,
    **settings: Any,
) -> pytorch.PyTorchTrialContext:
    """A context with the hyperparameters and the aggregation of an experiment.

    Args:
        core_context: Determined's core context of the run.
        experiment: The experiment to run.
        steps_completed: Number of batches that earlier processes trained.
        settings: The other arguments of `PyTorchTrialContext`.
    """
    context = pytorch.PyTorchTrialContext(
        core_context=core_context,
        hparams=copy.deepcopy(dict(experiment.hyperparameters)),
        aggregation_frequency=experiment.aggregation_frequency,
        steps_completed=steps_completed,
        managed_training=True,
        debug_enabled=False,
        **settings,
    )
    set_averaging(context, experiment)
    return context


def set_averaging(context: pytorch.PyTorchTrialContext, experiment: Experiment[Any]) -> None:
    """Make Determined average aggregated gradients if the experiment says so."""
    average_by_default(context, experiment.plan.average_aggregated_gradients)
