"""Trials with exact numbers: y = w x, the loss is y, and x is a power of two.

Row 5 of 16 is infinite, so the step with it is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from determined_amp import MixedPrecision

FINITE = [2.0 ** (row % 4) for row in range(16)]
ROWS = [*FINITE[:5], math.inf, *FINITE[6:]]


class Unmodified(pytorch.PyTorchTrial):
    """In float32, as it would be without mixed precision; no row is infinite."""

    rows: Sequence[float] = FINITE

    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(self.net())
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.5)
        self.optimizer = context.wrap_optimizer(sgd)
        every_batch = pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
        schedule: Any = StepLR(self.optimizer, 6, gamma=0.5)
        context.wrap_lr_scheduler(schedule, every_batch)

    def net(self):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.model(batch[0]).float().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.model(batch[0]).float().mean()}

    def build_training_data_loader(self):
        rows = TensorDataset(torch.tensor(self.rows)[:, None])
        return pytorch.DataLoader(rows, batch_size=1, shuffle=True)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=1)


class TenLines(Unmodified):
    """The same with mixed precision, and the infinite row."""

    rows = ROWS

    def net(self):
        self.amp = MixedPrecision(self.context)
        return self.amp.prepare(super().net())

    def train_batch(self, batch, epoch_idx, batch_idx):
        with self.amp.autocast():
            loss = self.model(batch[0]).float().mean()
        self.context.backward(self.amp.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, scaler=self.amp.scaler)
        return self.amp.update(loss, samples=1)

    def build_callbacks(self):
        return self.amp.callbacks(self)
