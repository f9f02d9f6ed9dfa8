"""Hand a trial to Determined's `Trainer` with the lengths and periods of its experiment."""

from __future__ import annotations

from collections.abc import Callable

from determined import pytorch

from determined_amp.audit import AuditMetrics, audited
from determined_amp.config.experiment import CheckpointPolicy, Experiment
from determined_amp.config.hparams import Hparams

# Work on the context of a trial before the trial is made.
Prepare = Callable[[pytorch.PyTorchTrialContext, Experiment[Hparams]], None]


def prepare_nothing(context: pytorch.PyTorchTrialContext, experiment: Experiment[Hparams]) -> None:
    """Leave the context as it is."""


def fit(
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    experiment: Experiment[Hparams],
    latest_checkpoint: str | None,
    policy: CheckpointPolicy,
) -> None:
    """Train to the end, or until the platform asks to stop.

    The first batch is audited, which stops a run that computes in another precision than asked.

    Args:
        trial: The trial.
        context: Its context.
        experiment: Gives lengths and periods.
        latest_checkpoint: Where to go on from, in the context's checkpoint storage.
        policy: Which validations are followed by a checkpoint.

    Raises:
        AuditError: if the first batch is not computed in the precision of the experiment.
        GuardError: if the run no longer trains.
    """
    training, amp = experiment.hparams.training, experiment.hparams.amp
    if amp.audit:
        audited(trial, context.device, amp.precision, AuditMetrics(context).add)
    pytorch.Trainer(trial, context).fit(
        max_length=training.max_length.unit(),
        validation_period=training.validation_period.unit(),
        checkpoint_period=training.checkpoint_period.unit(),
        reporting_period=training.reporting_period.unit(),
        checkpoint_policy=policy.value,
        latest_checkpoint=latest_checkpoint,
        profiling_enabled=experiment.platform.profiling.enabled,
    )
