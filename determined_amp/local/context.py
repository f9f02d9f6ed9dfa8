"""Determined's trial context, made for an experiment as `pytorch.init` makes it on a cluster."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from determined import core, pytorch

from determined_amp.config.experiment import Experiment, indivisible_batch
from determined_amp.config.settings import ConfigError

# Work on the context of a trial before the trial is made.
Prepare = Callable[[pytorch.PyTorchTrialContext, Experiment[Any]], None]


def trial_context(
    core_context: core.Context, experiment: Experiment[Any], first_batch: int = 0
) -> pytorch.PyTorchTrialContext:
    """The context of a run on this machine; the seeds are set, too.

    Args:
        core_context: Determined's platform for the run.
        experiment: What is run.
        first_batch: Batches trained before this process.

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
        num_gpus=torch.cuda.device_count(),  # Determined would count those of nvidia-smi
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
        core_context: Determined's platform for the run.
        experiment: What is run.
        steps_completed: Batches trained before this process.
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
    with_averaging(context, experiment)
    return context


def with_averaging(context: pytorch.PyTorchTrialContext, experiment: Experiment[Any]) -> None:
    """Have Determined average aggregated gradients where the experiment says so."""
    context._set_default_average_aggregated_gradients(experiment.plan.average_aggregated_gradients)
