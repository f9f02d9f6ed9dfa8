"""Mixed precision for a float32 `PyTorchTrial` whose code knows nothing of it.

The context hands each model that is wrapped, each backward and each step to
`UnmodifiedTraining`, which does what a trial with a `MixedPrecision` does itself.
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
from determined_amp.trial.notes import in_parts, note_on_master
from determined_amp.trial.unmodified_autocast import refusal
from determined_amp.trial.unmodified_training import UnmodifiedTraining

logger = logging.getLogger(__name__)

MakeTrial = Callable[[pytorch.PyTorchTrialContext], pytorch.PyTorchTrial]


def trial_of(
    experiment: Experiment, context: pytorch.PyTorchTrialContext
) -> pytorch.PyTorchTrial:
    """Make the trial of an experiment, in the precision of its `amp` section if it has
    one.

    Args:
        experiment: Names the trial.
        context: Made for this experiment.

    Raises:
        ConfigError: see `make_with_amp`.
    """
    if experiment.amp is None:
        return experiment.make(context)
    return make_with_amp(experiment.make, context, experiment.amp)


def trial_of_run(
    experiment: Experiment, context: pytorch.PyTorchTrialContext
) -> pytorch.PyTorchTrial:
    """Make the trial of a run as `trial_of` does, note its settings in the metadata of
    the run, and name its precision in the log.

    That is the first line where there is an `amp` section. Otherwise the trial must be
    made first, which may give a `MixedPrecision` settings of its own.
    """
    is_chief = context.distributed.rank == 0
    note_on_master(context, settings=in_parts(json.dumps(experiment.resolved())))
    if is_chief and experiment.amp is not None:
        logger.info(experiment.described_precision(experiment.precision))
    trial = trial_of(experiment, context)
    if is_chief and experiment.amp is None:
        logger.info(experiment.described_precision(precision_of(experiment, context)))
    return trial


def precision_of(experiment: Experiment, context: pytorch.PyTorchTrialContext) -> str:
    """The precision in which a trial that has been made trains, in words."""
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
        make_trial: Its class, or a function that makes it.
        context: Its context.
        settings: The precision, and all else of the `amp` section.

    Raises:
        ConfigError: if the trial cannot be trained that way, saying why and what to
            write. Some reasons show in the first batch only.
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
    """For an entrypoint that names a class: `entrypoint: determined_amp:TrialAsItIs`.

    It makes the trial of `hyperparameters.trial` in the precision of
    `hyperparameters.amp`.

    Args:
        context: The trial's context.

    Raises:
        ConfigError: if the configuration is wrong; and see `make_with_amp`.
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
