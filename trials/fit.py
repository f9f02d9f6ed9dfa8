"""Hand a trial to Determined's `Trainer` with the lengths and periods of its experiment."""

from __future__ import annotations

from determined import pytorch

from trials.experiment import Experiment, Hparams


def fit(
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    experiment: Experiment[Hparams],
    latest_checkpoint: str | None,
    checkpoint_policy: str,
) -> None:
    """Train to the end, or until the platform asks to stop.

    Args:
        trial: The trial.
        context: Its context.
        experiment: Gives lengths and periods.
        latest_checkpoint: Where to go on from, in the context's checkpoint storage.
        checkpoint_policy: Which validations are followed by a checkpoint: `best`, `all`, `none`.
    """
    training = experiment.hparams.training
    pytorch.Trainer(trial, context).fit(
        max_length=training.max_length.unit(),
        validation_period=training.validation_period.unit(),
        checkpoint_period=training.checkpoint_period.unit(),
        reporting_period=training.reporting_period.unit(),
        checkpoint_policy=checkpoint_policy,
        latest_checkpoint=latest_checkpoint,
        profiling_enabled=experiment.profiling,
    )
