"""Makes Determined's trial context for an experiment, as `pytorch.init` does on a cluster."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from determined import core, pytorch

from determined_amp.amp.errors import ConfigError
from determined_amp.experiment.experiment import Experiment, indivisible_batch
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
    context = pytorch.PyTorchTrialContext(
        core_context=core_context,
        hparams=copy.deepcopy(dict(experiment.hyperparameters)),
        exp_conf=copy.deepcopy(dict(experiment.config)),
        trial_seed=experiment.seed,
        aggregation_frequency=experiment.aggregation_frequency,
        slots_per_trial=processes.size,
        num_gpus=torch.cuda.device_count(),  # Determined would count all GPUs of nvidia-smi
        steps_completed=first_batch,
        managed_training=True,
        debug_enabled=False,
    )
    average_by_default(context, experiment.plan.average_aggregated_gradients)
    return context
