"""Makes the trial of an experiment, in the precision of its `amp` section.

A trial that makes no `MixedPrecision` itself gets an `UnmodifiedTraining`: the context
passes it each wrapped model, each backward and each step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from determined import pytorch
from torch import nn

from determined_amp.amp.errors import UserError
from determined_amp.amp.settings import AmpSettings
from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.experiment.failures import ending_the_program
from determined_amp.trial.determined_private import amp_of
from determined_amp.trial.notes import note_on_master
from determined_amp.trial.unmodified.autocast import refusal
from determined_amp.trial.unmodified.calls import UnmodifiedTraining

logger = logging.getLogger(__name__)

MakeTrial = Callable[[pytorch.PyTorchTrialContext], pytorch.PyTorchTrial]


def trial_of(
    experiment: Experiment, context: pytorch.PyTorchTrialContext
) -> pytorch.PyTorchTrial:
    """Make the trial of an experiment, in the precision of its `amp` section, if any.

    Args:
        experiment: The experiment, which names the trial.
        context: The context of this experiment.

    Raises:
        ConfigError: see `make_with_amp`.
    """
    if experiment.amp is None:
        return experiment.make(context)
    return make_with_amp(experiment.make, context, experiment.amp)


def trial_of_run(
    experiment: Experiment, context: pytorch.PyTorchTrialContext
) -> pytorch.PyTorchTrial:
    """Make the trial of a run, note its settings on the master, and log its precision.

    With an `amp` section the precision is the first line of the log. Otherwise it is
    known only after the trial is made, which may make a `MixedPrecision` itself.
    """
    is_chief = context.distributed.rank == 0
    note_on_master(context, settings=json.dumps(experiment.resolved()))
    if is_chief and experiment.amp is not None:
        logger.info(experiment.described_precision(experiment.precision))
    trial = trial_of(experiment, context)
    if is_chief and experiment.amp is None:
        logger.info(experiment.described_precision(precision_of(experiment, context)))
    return trial


def precision_of(experiment: Experiment, context: pytorch.PyTorchTrialContext) -> str:
    """The precision in words; call it after the trial is made."""
    amp = amp_of(context)
    if experiment.amp is None and amp is not None:
        return (
            f"{amp.settings.precision.value} (by AmpSettings in the trial; no amp"
            " section)"
        )
    return experiment.precision


@ending_the_program()
def make_with_amp(
    make_trial: MakeTrial, context: pytorch.PyTorchTrialContext, settings: AmpSettings
) -> pytorch.PyTorchTrial:
    """Make a trial, and train it in mixed precision even if its code is plain float32.

    A trial that makes a `MixedPrecision` itself is left alone.

    Args:
        make_trial: The class of the trial, or a function that makes it.
        context: The context of the trial.
        settings: The `amp` section.

    Raises:
        ConfigError: if the trial cannot be trained that way. It says why, and what to
            write. Some reasons show only in the first batch.
    """
    wrap, made = context.wrap_model, list[UnmodifiedTraining]()

    def wrap_model(model: nn.Module) -> nn.Module:
        if amp_of(context) is None:
            made.append(UnmodifiedTraining(context, settings))
        for training in made:
            training.prepare(model)
        return wrap(model)

    context.wrap_model = wrap_model  # type: ignore[method-assign]
    trial = make_trial(context)
    if amp_of(context) is None:
        raise refusal("it wraps no model", "self.model = context.wrap_model(model)")
    for training in made:
        training.attach(trial)
    return trial


class TrialAsItIs(pytorch.PyTorchTrial):
    """Makes the trial of `hyperparameters.trial` in the precision of the `amp` section.

    Use it where an entrypoint names a class: `entrypoint: determined_amp:TrialAsItIs`.

    Args:
        context: The trial's context.

    Raises:
        ConfigError: if the configuration is wrong, or as in `make_with_amp`.
    """

    @ending_the_program()
    def __new__(cls, context: pytorch.PyTorchTrialContext) -> Any:
        config, hparams = context.get_experiment_config(), context.get_hparams()
        try:
            experiment = parse(config, "experiment", hyperparameters=hparams)
        except UserError as error:
            note_on_master(context, failure=str(error))
            raise
        return trial_of_run(experiment, context)
