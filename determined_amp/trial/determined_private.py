"""The private names of Determined 0.38.1 that the library uses.

Determined offers no public way to do what is done here. To port the library to another
version, review this file, and the methods of Determined's loop that `controller.py` and
its subclasses replace.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import determined as det
from determined import core, pytorch
from determined.common.api import authentication, bindings, certs, errors

from determined_amp.amp.core import AmpCore
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import Config, Metrics

logger = logging.getLogger(__name__)

# Determined's training loop.
Controller = pytorch._PyTorchTrialController

# The errors that a request to the master may raise.
REFUSED = (errors.BadRequestException, bindings.APIHttpError, OSError)

# The attribute of a context that holds the `MixedPrecision` of its trial.
AMP = "determined_amp_mixed_precision"

# What a context knows, but offers no public name for.


def amp_of(context: pytorch.PyTorchTrialContext) -> AmpCore | None:
    """The mixed precision of a context, if its trial has one."""
    amp: AmpCore | None = getattr(context, AMP, None)
    return amp


def train_context(context: pytorch.PyTorchTrialContext) -> core.TrainContext:
    """The object that takes the reports and the metadata of the run."""
    return context._core.train


def train_context_of_task(info: det.ClusterInfo) -> core.TrainContext:
    """The same for a task without a context. It takes metadata, but no metrics."""
    certificate = certs.default_load(info.master_url)
    session = authentication.login_from_task(info.master_url, certificate)
    return core.TrainContext(
        session,
        info.trial.trial_id,
        info.trial.experiment_id,
        None,  # type: ignore[arg-type]  # the metrics
        core.DummyDistributedContext(),
        core.TensorboardMode.MANUAL,
        None,
        None,
    )


def is_stopped_by_search(train: core.TrainContext) -> bool:
    """Whether the master has ended this trial because its search stops trials early.

    The master of 0.38.1 marks such a trial, but sends no signal to its task. If the
    master does not answer, the trial continues.
    """
    if isinstance(train, core.DummyTrainContext):
        return False
    try:
        trial = bindings.get_GetTrial(train._session, trialId=train._trial_id).trial
    except REFUSED as error:
        logger.warning(
            "the master did not answer whether its search goes on: %s", error
        )
        return False
    return trial.state is bindings.trialv1State.STOPPING_COMPLETED


def checkpoint_context(context: pytorch.PyTorchTrialContext) -> core.CheckpointContext:
    """The object that stores the checkpoints of a context."""
    return context._core.checkpoint


def aggregation_frequency(context: pytorch.PyTorchTrialContext) -> int:
    """The number of batches per optimizer step."""
    return int(context._aggregation_frequency)


def sections(context: pytorch.PyTorchTrialContext) -> tuple[Config, Config]:
    """Configuration and hyperparameters; empty if script and cluster give none."""
    info, hyperparameters = det.get_cluster_info(), context._hparams
    if hyperparameters is None and info is not None and info.task_type == "TRIAL":
        hyperparameters = info.trial.hparams
    return context._exp_conf or {}, hyperparameters or {}


def searcher(context: pytorch.PyTorchTrialContext) -> Config:
    """The `searcher` section of the configuration; empty if there is none."""
    return (context._exp_conf or {}).get("searcher") or {}


def trial_seed(context: pytorch.PyTorchTrialContext) -> int | None:
    """The seed of the trial; None in a `Trainer` outside of a cluster."""
    return context._trial_seed


def average_by_default(
    context: pytorch.PyTorchTrialContext, average_aggregated_gradients: bool
) -> None:
    """Set the default of `wrap_optimizer(average_aggregated_gradients=...)`."""
    context._set_default_average_aggregated_gradients(average_aggregated_gradients)


def epoch_length(context: pytorch.PyTorchTrialContext) -> int:
    """The number of batches of an epoch on one slot; call it once the loaders exist."""
    assert context._epoch_len is not None
    return context._epoch_len


def shorten_epoch(context: pytorch.PyTorchTrialContext, batches: int) -> None:
    """Let an epoch end after at most this many batches on one slot."""
    context._epoch_len = min(epoch_length(context), batches)


def current_batch(context: pytorch.PyTorchTrialContext) -> int | None:
    """The index of the batch that is being trained; None before the first."""
    return context._current_batch_idx


def ends_step(context: pytorch.PyTorchTrialContext) -> bool:
    """Whether optimizers step in the batch that is being trained."""
    return context._should_communicate_and_update()


def scaler_of(context: pytorch.PyTorchTrialContext) -> Any:
    """The `GradScaler` that Determined saves, of any class; None if there is none."""
    return context._scaler


def forget_scaler(context: pytorch.PyTorchTrialContext) -> None:
    """Leave the `GradScaler` out of checkpoints."""
    context._scaler = None


def has_amp_of_its_own(context: pytorch.PyTorchTrialContext) -> bool:
    """Whether the trial has asked Determined for Apex or for its automatic AMP."""
    return bool(context._use_apex or context.experimental._auto_amp)


def schedulers(
    context: pytorch.PyTorchTrialContext,
) -> list[tuple[Any, pytorch.LRScheduler.StepMode]]:
    """The torch schedulers of `context.wrap_lr_scheduler`, and when each steps."""
    return [
        (wrapped._scheduler, wrapped._step_mode) for wrapped in context.lr_schedulers
    ]


def step_methods(context: pytorch.PyTorchTrialContext) -> list[tuple[object, str]]:
    """What moves weights or schedules of a context: objects with a method name each."""
    return [
        (context, "step_optimizer"),
        *((each, "step") for each, _ in schedulers(context)),
    ]


def task_configuration(info: det.ClusterInfo) -> Config:
    """The experiment configuration of a cluster's task, completed by the master."""
    return info.trial._config


def leave_the_cluster() -> None:
    """Make Determined believe, until the process ends, that there is no cluster."""
    det.get_cluster_info = lambda: None


def end_loop() -> NoReturn:
    """End the training from within a batch, without a checkpoint or an error."""
    raise pytorch._ShouldExit(skip_exit_checkpoint=True)


# What is replaced for the whole process, and why. For torch also see `amp/patched.py`.
#
# * `torch.load`, while a checkpoint is loaded: Determined does not pass `weights_only`,
#   and without it torch before 2.6 runs the code in a checkpoint.
# * `pytorch._PyTorchTrialController`, while `fit` or a command of ours trains:
#   `Trainer.fit` takes no loop as an argument.
# * `sys.excepthook`, by the first `UserError` that leaves `MixedPrecision` or the loop:
#   a user's script has no other way to get exit status 2 and the line that a log policy
#   matches.
# * `det.get_cluster_info`, by a command whose trials must not see the cluster.
# * `util.write_user_code`, while `local/trainer.py` saves or the doctor runs a trial:
#   Determined copies the whole working directory.
#
# `trial/batches.py` lists what is replaced on a trial that has a `MixedPrecision`, and
# on its context, while it trains.


@contextmanager
def controlled_by(
    controller: Callable[..., pytorch._PyTorchTrialController],
) -> Iterator[None]:
    """Let `pytorch.Trainer.fit` run its loop in `controller`."""
    with patched(pytorch, "_PyTorchTrialController", controller):
        yield


def is_determineds_own_loop() -> bool:
    """Whether `pytorch.Trainer.fit` runs Determined's loop as it is."""
    return pytorch._PyTorchTrialController is Controller


# Determined's context for reports that stay on this machine.


class LocalTrainContext(core.DummyTrainContext):
    """Passes reports to `take_report`, which a subclass defines."""

    # The number of batches before the newest validation.
    last_validation: int | None = None

    def take_report(self, group: str, batches: int, metrics: Metrics) -> None:
        """Called with each report of the loop."""
        raise NotImplementedError

    def _get_last_validation(self) -> int | None:
        return self.last_validation

    def _report_trial_metrics(
        self, group: str, steps_completed: int, metrics: Metrics, *_: Any
    ) -> None:
        self.take_report(group, steps_completed, metrics)
