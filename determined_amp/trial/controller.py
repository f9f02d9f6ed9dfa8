"""Determined's training loop with safe checkpoints and exact resumes."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from determined import pytorch, util

from determined_amp.amp.errors import ConfigError, GuardError, UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import Metrics, StateDict
from determined_amp.amp.tensors import own_copy
from determined_amp.experiment.failures import ending_the_program
from determined_amp.trial.checkpoint import (
    SAME_TRIAL,
    PortableCheckpoint,
    allow_numpy_random_state,
    check_bytes,
    check_optimizers,
    checksums_written,
    read_without_code,
    restoring,
)
from determined_amp.trial.determined_private import (
    Controller,
    controlled_by,
    epoch_length,
    is_determineds_own_loop,
    is_stopped_by_search,
    searcher,
    train_context,
    trial_seed,
)
from determined_amp.trial.random_state import (
    random_state,
    restore_random_state,
    settle_order,
)

logger = logging.getLogger(__name__)

# Determined's file names for the state of a trial, now and in older checkpoints.
_STATES = ("state_dict.pth", "checkpoint.pt")


class SafeController(Controller):
    """Determined's training loop, which never runs code from a checkpoint.

    A run saves a checkpoint if the guard ends it in a good state, or if its validation
    lacks the searcher's metric. A resumed run sees the same batches and random numbers
    as an undisturbed one.
    """

    _metric_problem: str | None = None

    @property
    def evaluates_batches(self) -> bool:
        """Whether the trial has an `evaluate_batch`."""
        return bool(self._evaluate_batch_defined())

    @ending_the_program()
    def run(self) -> None:
        # Outside of a cluster, `Trainer` does not count the batches of earlier runs.
        if (
            self.local_training
            and self.latest_checkpoint is not None
            and not self.start_from_batch
        ):
            with self.core_context.checkpoint.restore_path(
                self.latest_checkpoint
            ) as path:
                trained = self._counts_in(path).get("batches_trained", 0)
            self.start_from_batch = self.context._steps_completed = trained
        super().run()

    def _set_data_loaders(self) -> None:
        super()._set_data_loaders()
        # None outside of a cluster, where a script sets its own seed
        seed = trial_seed(self.context)
        seed = self.context.distributed.broadcast(
            torch.initial_seed() if seed is None else seed
        )
        settle_order(self.training_loader, seed, warns=self.is_chief)
        # Determined would only fail an assertion, at the first batch.
        if not epoch_length(self.context):
            raise UserError(
                "the training data loader has no batch: the data is empty, or smaller "
                "than the one batch that drop_last drops; allowed: more data, or a "
                "smaller batch"
            )

    def _run(self) -> None:
        try:
            super()._run()
        except GuardError as error:
            if error.state_is_good and not self._checkpoint_is_current():
                self._checkpoint(already_exiting=True)
            raise

    def _validate(self) -> Metrics:
        if self._steps_until_complete(self.max_length) <= 0 and not self._is_due():
            self._remember()  # a longer run would not validate here
        metrics: Metrics = super()._validate()
        if self.is_chief and self.searcher_metric_name:
            self._check_searcher_metric(metrics)
        # Only the chief has the metrics and asks the master, but all ranks must end.
        is_over = self.is_chief and self._is_over()
        problem, is_over = self.context.distributed.broadcast(
            (self._metric_problem, is_over)
        )
        if problem is not None:
            if not self._checkpoint_is_current():
                self._checkpoint(already_exiting=True)
            raise ConfigError("experiment", [problem])
        if is_over:
            logger.info("the search stops this trial early")
            self.context.set_stop_requested(True)
        return metrics

    def _remember(self) -> None:
        """Let the next checkpoint have what a validation may move as it is now."""
        before, gpu = self._before_validation, self.context.distributed.local_rank
        before.callback(restore_random_state, random_state(gpu), gpu)
        for optimizer in self.context.optimizers:
            for group in optimizer.param_groups:
                settings = {k: v for k, v in group.items() if k != "params"}
                before.callback(group.update, own_copy(settings))
        if self.is_chief:  # it saves
            with self._portable():
                self._portable_checkpoint.remember(self.callbacks)

    def _is_over(self) -> bool:
        """Whether a search has stopped this trial."""
        is_searched = searcher(self.context).get("name", "single") != "single"
        return is_searched and is_stopped_by_search(train_context(self.context))

    def _is_due(self) -> bool:
        """Whether a run of any length would validate after this batch."""
        assert self.state
        if isinstance(self.validation_period, pytorch.Batch):
            return self.validation_period.should_stop(self.state.batches_trained)
        epoch = epoch_length(self.context)
        epochs, more = divmod(self.state.batches_trained, epoch)
        return not more and self.validation_period.should_stop(epochs)

    def _checkpoint(self, already_exiting: bool) -> None:
        self._before_validation.close()
        distributed = self.context.distributed
        of_ranks = distributed.gather(random_state(distributed.local_rank))
        if distributed.size > 1:
            self._portable_checkpoint.of_ranks = of_ranks
        super()._checkpoint(already_exiting)

    def _save(self, path: Path) -> None:
        """Save as Determined does, but in plain types and with checksums.

        This holds even if the trial has none of our callbacks.
        """
        with self._portable(), checksums_written():
            super()._save(path)

    @cached_property
    def _before_validation(self) -> ExitStack:
        """Puts back what a validation has moved that a longer run would not make."""
        return ExitStack()

    @cached_property
    def _portable_checkpoint(self) -> PortableCheckpoint:
        return PortableCheckpoint(self.context)

    def _portable(self) -> AbstractContextManager[None]:
        ours = {PortableCheckpoint.NAME: self._portable_checkpoint}
        return patched(self, "callbacks", {**self.callbacks, **ours})

    def _check_searcher_metric(self, val_metrics: Metrics) -> Any:
        """Record what is wrong with the metric: raising now would hang other ranks."""
        metric = self.searcher_metric_name
        numbers = sorted(
            name for name, x in val_metrics.items() if util.is_numerical_scalar(x)
        )
        if metric in numbers:
            return val_metrics[metric]
        fault = "is no number" if metric in val_metrics else "is not reported"
        self._metric_problem = (
            f"searcher.metric: got {metric}, which {fault}; allowed: "
            f"{', '.join(numbers)}, or no metric, and then no checkpoint is the best"
        )
        return 0.0

    def _load(self, load_path: Path) -> None:
        """Restore the trial from a checkpoint folder.

        Raises:
            CheckpointError: if the checkpoint is incomplete, damaged, unsafe, or does
                not fit this trial.
        """
        allow_numpy_random_state()
        check_bytes(load_path)
        same_trial = bool(self._counts_in(load_path))
        own_load = torch.load

        def load(file: Any, *args: Any, **kwargs: Any) -> Any:
            if Path(str(file)).name not in _STATES:  # a file of the trial's own
                return own_load(file, *args, **{"weights_only": True, **kwargs})
            content = own_load(file, *args, **kwargs, weights_only=True)
            if not isinstance(content, dict):  # Determined would ignore it
                kind = type(content).__name__
                raise TypeError(
                    f"state_dict.pth holds a {kind}, not the state of a trial"
                )
            content[SAME_TRIAL] = same_trial
            if same_trial:
                check_optimizers(content, self.context.optimizers)
            return content

        with restoring(load_path), patched(torch, "load", load), self._portable():
            super()._load(load_path)

    def _counts_in(self, load_path: Path) -> StateDict:
        """The counts of the loop in a checkpoint; empty if it belongs to another
        trial.
        """
        with restoring(load_path):
            saved = read_without_code(load_path / "trial_state.pkl")
        return saved if saved.get("trial_id") == self.trial_id else {}


class BatchCollector(SafeController):
    """The loop for a command that collects batches and trains nothing."""

    def _auto_step_lr_scheduler_per_batch(self, *_: Any) -> None:
        """Do nothing: torch warns if a schedule moves without its optimizer."""


def safe_loop() -> AbstractContextManager[None]:
    """Let `Trainer.fit` run a `SafeController`, unless a command has chosen a loop."""
    return controlled_by(SafeController) if is_determineds_own_loop() else nullcontext()
