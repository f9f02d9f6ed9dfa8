"""The part that all trials of this repository share: data, validation, schedule, callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from determined import pytorch

from determined_amp import MixedPrecision
from trials.hparams import Hparams
from trials.task import Task


class TaskTrial(pytorch.PyTorchTrial):
    """A trial on a `Task`; a subclass makes model and optimizer, and trains on a batch.

    Attributes:
        context: Determined's context of this trial.
        hparams: The hyperparameters.
        amp: Precision, scaler, guard and audit.
        task: Data and validation.
        model: The model, wrapped.
        optimizer: The optimizer, wrapped.
    """

    context: pytorch.PyTorchTrialContext
    hparams: Hparams
    amp: MixedPrecision
    task: Task[Any]
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def wrap_optimizer(
        self, make: Callable[..., torch.optim.Optimizer], **settings: float
    ) -> torch.optim.Optimizer:
        """Make the optimizer of the model, and wrap it.

        Args:
            make: The class of the optimizer.
            settings: Its settings, besides the learning rate and the weight decay.
        """
        optimizer = make(
            self.model.parameters(),
            lr=self.hparams.learning_rate,
            weight_decay=self.hparams.weight_decay,
            fused=self.amp.fused,
            **settings,
        )
        return self.context.wrap_optimizer(optimizer)

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return self.task.evaluate(self.model, batch)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        loader, epoch = self.task.training_loader()
        scheduler = self.hparams.scheduler(self.optimizer, epoch)
        if scheduler is not None:
            self.amp.wrap_lr_scheduler(scheduler)
        return loader

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.task.validation_loader()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)  # scaler and counts in checkpoints, guard, audit
