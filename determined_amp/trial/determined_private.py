"""All private names of Determined 0.38.1 that the library uses.

Determined offers no public way to do what is done here. To port the library to another
version is to review this file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import determined as det
import torch
from determined import core, pytorch, util
from determined.common.api import authentication, bindings, certs, errors

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError, GuardError, UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import Config, Metrics, StateDict
from determined_amp.experiment.failures import ending_the_program
from determined_amp.trial.checkpoint import (
    PortableCheckpoint,
    allow_numpy_random_state,
    check_bytes,
    check_optimizers,
    load_plain,
    read_without_code,
    restoring,
)
from determined_amp.trial.random_state import (
    random_state,
    restore_random_state,
    settle_order,
)

logger = logging.getLogger(__name__)

# What a request to the master may raise.
REFUSED = (errors.BadRequestException, bindings.APIHttpError, OSError)

# The attribute of a context that holds the `MixedPrecision` of its trial.
AMP = "determined_amp_mixed_precision"

# What a context knows, but does not offer.


def amp_of(context: pytorch.PyTorchTrialContext) -> AmpCore | None:
    """The mixed precision of a context, if its trial has one."""
    amp: AmpCore | None = getattr(context, AMP, None)
    return amp


def train_context(context: pytorch.PyTorchTrialContext) -> core.TrainContext:
    """The object that takes the reports and the metadata of the run."""
    return context._core.train


def train_context_of_task(info: det.ClusterInfo) -> core.TrainContext:
    """The same for a task without a context; it takes metadata, and no metrics."""
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
    """Configuration and hyperparameters; empty where a script has given none, and the
    task of a cluster has none.
    """
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
    """The number of batches of an epoch on one slot; the loaders must have been
    made.
    """
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
    """Torch's schedulers of `context.wrap_lr_scheduler`, and when Determined steps
    each.
    """
    return [
        (wrapped._scheduler, wrapped._step_mode) for wrapped in context.lr_schedulers
    ]


def portable_checkpoint(context: pytorch.PyTorchTrialContext) -> PortableCheckpoint:
    """The callback that saves plain types, and restores them."""
    saved = [each for each, _ in schedulers(context)]
    rank, optimizers = context.distributed.rank, context.optimizers
    return PortableCheckpoint(saved, rank, optimizers)


def what_steps(context: pytorch.PyTorchTrialContext) -> list[tuple[object, str]]:
    """Objects of a context that move weights or schedules, each with the name of its
    method.
    """
    return [
        (context, "step_optimizer"),
        *((each, "step") for each, _ in schedulers(context)),
    ]


def task_configuration(info: det.ClusterInfo) -> Config:
    """The experiment configuration of a cluster's task, as the master has completed
    it.
    """
    return info.trial._config


def leave_the_cluster() -> None:
    """Make Determined believe for good that this process runs outside of a cluster."""
    det.get_cluster_info = lambda: None


def end_loop() -> NoReturn:
    """End the training from within a batch, without a checkpoint or an error."""
    raise pytorch._ShouldExit(skip_exit_checkpoint=True)


_Controller = pytorch._PyTorchTrialController


class SafeController(_Controller):
    """Determined's training loop, which here loads checkpoints without running code in
    them.

    A run leaves a checkpoint of its last good state if the guard ends it, or if its
    validation lacks the searcher's metric. A resumed run sees the same batches and
    random numbers as an undisturbed one.

    A subclass extends its public methods, which Determined calls by private names.
    """

    _metric_problem: str | None = None
    _before_validation: dict[str, Any] | None = None

    @ending_the_program()
    def run(self) -> None:
        # Outside of a cluster `Trainer` does not know of earlier batches.
        if (
            self.local_training
            and self.latest_checkpoint is not None
            and not self.start_from_batch
        ):
            with self.core_context.checkpoint.restore_path(
                self.latest_checkpoint
            ) as path:
                self.start_from_batch = self._counts_in(path).get("batches_trained", 0)
            self.context._steps_completed = self.start_from_batch
        super().run()

    def set_data_loaders(self) -> None:
        super()._set_data_loaders()
        # None off a cluster, where a script sets its own
        seed = self.context._trial_seed
        seed = self.context.distributed.broadcast(
            torch.initial_seed() if seed is None else seed
        )
        settle_order(self.training_loader, seed, warns=self.is_chief)
        if not self.context._epoch_len:  # Determined asserts it, at the first batch
            raise UserError(
                "the training data loader has no batch: the data is empty, or smaller "
                "than the one batch that drop_last drops; allowed: more data, or a "
                "smaller batch"
            )

    def run_loop(self) -> None:
        try:
            super()._run()
        except GuardError as error:
            if error.state_is_good and not self._checkpoint_is_current():
                self.checkpoint(already_exiting=True)
            raise

    def validate(self) -> Metrics:
        if self._steps_until_complete(self.max_length) <= 0 and not self._is_due():
            # A longer run has no validation here, and a validation draws from the
            # random state.
            self._before_validation = random_state(self.context.distributed.local_rank)
        metrics: Metrics = super()._validate()
        if self.is_chief and self.searcher_metric_name:
            self._check_searcher_metric(metrics)
        # Only the chief has the metrics and asks the master, and all ranks must end.
        is_over = self.is_chief and self._is_over()
        problem, is_over = self.context.distributed.broadcast(
            (self._metric_problem, is_over)
        )
        if problem is not None:
            if not self._checkpoint_is_current():
                self.checkpoint(already_exiting=True)
            raise ConfigError("experiment", [problem])
        if is_over:
            logger.info("the search stops this trial early")
            self.context.set_stop_requested(True)
        return metrics

    def _is_over(self) -> bool:
        """Whether this trial belongs to a search that has stopped it."""
        is_searched = searcher(self.context).get("name", "single") != "single"
        return is_searched and is_stopped_by_search(train_context(self.context))

    def _is_due(self) -> bool:
        """Whether a run of any length has a validation at this batch."""
        assert self.state
        assert self.context._epoch_len
        if isinstance(self.validation_period, pytorch.Batch):
            return self.validation_period.should_stop(self.state.batches_trained)
        epochs, more = divmod(self.state.batches_trained, self.context._epoch_len)
        return not more and self.validation_period.should_stop(epochs)

    def checkpoint(self, already_exiting: bool) -> None:
        if self._before_validation is not None:
            restore_random_state(
                self._before_validation, self.context.distributed.local_rank
            )
        distributed = self.context.distributed
        of_ranks = distributed.gather(random_state(distributed.local_rank))
        if distributed.size > 1:
            self._portable_checkpoint.of_ranks = of_ranks
        super()._checkpoint(already_exiting)

    def save(self, path: Path) -> None:
        """Save as Determined does, with plain types even without callbacks of ours."""
        with self._portable():
            super()._save(path)

    @cached_property
    def _portable_checkpoint(self) -> PortableCheckpoint:
        return portable_checkpoint(self.context)

    def _portable(self) -> AbstractContextManager[None]:
        ours = {PortableCheckpoint.NAME: self._portable_checkpoint}
        return patched(self, "callbacks", {**self.callbacks, **ours})

    @property
    def evaluates_batches(self) -> bool:
        """Whether the trial has an `evaluate_batch`."""
        return bool(self._evaluate_batch_defined())

    # What Determined calls.

    def _set_data_loaders(self) -> None:
        self.set_data_loaders()

    def _run(self) -> None:
        self.run_loop()

    def _validate(self) -> Metrics:
        return self.validate()

    def _checkpoint(self, already_exiting: bool) -> None:
        self.checkpoint(already_exiting)

    def _save(self, path: Path) -> None:
        self.save(path)

    def _check_searcher_metric(self, val_metrics: Metrics) -> Any:
        """Note what is wrong with the metric; an error now would leave the other ranks
        waiting.
        """
        metric = self.searcher_metric_name
        numbers = sorted(
            name for name, x in val_metrics.items() if util.is_numerical_scalar(x)
        )
        if metric in numbers:
            return val_metrics[metric]
        fault = "is no number" if metric in val_metrics else "the trial does not report"
        self._metric_problem = (
            f"searcher.metric: got {metric}, which {fault}; allowed: "
            f"{', '.join(numbers)}, or no metric, and then no checkpoint is the best"
        )
        return 0.0

    def _load(self, load_path: Path) -> None:
        """Restore the trial from a checkpoint folder.

        Raises:
            CheckpointError: if the checkpoint is incomplete, damaged, unsafe or does
                not fit.
        """
        allow_numpy_random_state()
        check_bytes(load_path)
        same_trial = bool(self._counts_in(load_path))
        own_load = torch.load

        def load(*args: Any, **kwargs: Any) -> StateDict:
            content = load_plain(own_load, *args, **kwargs)
            if same_trial:
                check_optimizers(content, self.context.optimizers)
            return content

        with restoring(load_path), patched(torch, "load", load), self._portable():
            for callback in self.callbacks.values():
                notify = getattr(callback, "on_checkpoint_of", None)
                if notify is not None:
                    notify(same_trial=same_trial)
            super()._load(load_path)

    def _counts_in(self, load_path: Path) -> StateDict:
        """The counts of the loop in a checkpoint; empty if it belongs to another
        trial.
        """
        with restoring(load_path):
            saved = read_without_code(load_path / "trial_state.pkl")
        return saved if saved.get("trial_id") == self.trial_id else {}


# What is replaced for the whole process, and why; for torch see `amp/patched.py` as
# well.
#
# * `torch.load`, while a checkpoint is loaded: Determined does not pass `weights_only`,
#   and torch before 2.6 runs the code in a checkpoint without it.
# * `pytorch._PyTorchTrialController`, while `fit` or a command of ours trains:
#   `Trainer.fit` takes no loop as an argument.
# * `sys.excepthook`, by the first `UserError` that leaves `MixedPrecision` or the loop:
#   nothing else gives a script of the user's exit status 2 and the line that a log
#   policy matches.
#
# On a trial that has a `MixedPrecision` and on its context, while it trains: see
# `trial/batches.py`.


class WatchedController(SafeController):
    """The loop of a trial whose batches and epochs somebody follows."""

    train_one_batch = _Controller._train_batch
    end_epoch = _Controller._on_epoch_end

    def _train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Metrics:
        return self.train_one_batch(batch, epoch_idx, batch_idx)

    def _on_epoch_end(self, epoch_idx: int) -> None:
        self.end_epoch(epoch_idx)


class BatchCollector(SafeController):
    """The loop of a trial whose batches are collected, not trained; no schedule
    moves.
    """

    def _auto_step_lr_scheduler_per_batch(self, *_: Any) -> None:
        """Do nothing: torch warns of a schedule that moves without its optimizer."""


@contextmanager
def controlled_by(
    controller: Callable[..., pytorch._PyTorchTrialController],
) -> Iterator[None]:
    """Let `pytorch.Trainer.fit` run its loop in `controller`."""
    with patched(pytorch, "_PyTorchTrialController", controller):
        yield


def is_determineds_own_loop() -> bool:
    """Whether `pytorch.Trainer.fit` runs Determined's loop as it is."""
    return pytorch._PyTorchTrialController is _Controller


def safe_loop() -> AbstractContextManager[None]:
    """Let `pytorch.Trainer.fit` run a `SafeController`, unless a command has chosen a
    loop.
    """
    return controlled_by(SafeController) if is_determineds_own_loop() else nullcontext()


# The context of Determined that keeps reports on this machine.


class LocalTrainContext(core.DummyTrainContext):
    """Hands reports to `take_report`, which a subclass gives."""

    # The batches of the newest validation.
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
