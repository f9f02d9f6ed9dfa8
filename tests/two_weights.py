"""A trial with two models and two optimizers, whose every number can be written down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from determined import pytorch
from torch import nn
from torch.utils.data import TensorDataset

from determined_amp import MixedPrecision


class TwoWeights(pytorch.PyTorchTrial):
    """A discriminator y = w_d x_d and a generator y = w_g x_g, both from w = 1, SGD with rate 0.5.

    Attributes:
        fused: Whether the optimizers are.
        how: Who steps: "context", or in batches of one "scaler" or "optimizer" alone.
        diagnosed: How often the guard trained a batch again.
        norms: Of the gradients that each batch stepped with, of both models.
    """

    how = "context"
    fused = False

    def __init__(
        self, context: pytorch.PyTorchTrialContext, rows: Sequence[tuple[float, float]]
    ) -> None:
        self.context = context
        self.rows = rows
        self.amp = MixedPrecision(context)
        self.diagnosed = 0
        self.norms: list[float] = []
        self.models, self.optimizers = [], []
        for _ in range(2):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            self.models.append(context.wrap_model(self.amp.prepare(model)))
            sgd = torch.optim.SGD(self.models[-1].parameters(), lr=0.5, fused=self.fused)
            self.optimizers.append(context.wrap_optimizer(sgd))

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        self.diagnosed += self.amp.is_replaying
        xs = batch
        losses = []
        for x, model, optimizer in zip(xs, self.models, self.optimizers, strict=True):
            with self.amp.autocast():
                losses.append(model(x).float().mean())
            self.context.backward(self.amp.scaler.scale(losses[-1]))
            if optimizer is self.optimizers[0] or self.steps_generator(batch_idx):
                self.step(optimizer)
        return self.amp.update(losses[0])

    def steps_generator(self, batch_idx: int) -> bool:
        return True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.amp.is_replaying:
            (parameter,) = optimizer.param_groups[0]["params"]
            self.norms.append(float(parameter.grad))
        if self.how == "context":
            clip = self.amp.clip(optimizer)
            self.context.step_optimizer(optimizer, clip_grads=clip, scaler=self.amp.scaler)
            return
        self.amp.scaler.step(optimizer)
        if self.how == "optimizer" and self.amp.is_replaying:
            optimizer.step()  # a trial that steps by hand, whatever the guard wants
        optimizer.zero_grad()

    def weights(self) -> list[float]:
        return [float(next(model.parameters()).detach()) for model in self.models]

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        columns = torch.tensor(self.rows).T.reshape(2, -1, 1)
        return pytorch.DataLoader(TensorDataset(*columns), batch_size=1)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        zeros = torch.zeros(self.context.distributed.size, 1)
        return pytorch.DataLoader(TensorDataset(zeros, zeros), batch_size=1)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)
