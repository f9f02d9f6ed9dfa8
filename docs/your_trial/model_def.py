"""A small trial: which of ten corners of a cube is nearest to a noisy point?"""

from typing import Any

import torch
from determined import pytorch
from determined_amp import MixedPrecision
from torch import nn
from torch.utils.data import TensorDataset


def points(count: int) -> TensorDataset:
    """Noisy points, (count, 32) float32, and their corners, (count,) int64."""
    corners = torch.randn(10, 32, generator=torch.Generator().manual_seed(0)).sign()
    nearest = torch.arange(count) % 10
    return TensorDataset(corners[nearest] + torch.randn(count, 32), nearest)


def net() -> nn.Module:
    """Map points (B, 32) to logits (B, 10)."""
    return nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))


class MyTrial(pytorch.PyTorchTrial):
    """A trial like those in Determined's documentation."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.amp = MixedPrecision(context)
        self.model = context.wrap_model(self.amp.prepare(net()))
        rate = context.get_hparam("learning_rate")
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.optimizer = context.wrap_optimizer(optimizer)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(points(2000), self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(points(500), self.context.get_per_slot_batch_size())

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        inputs, labels = batch
        with self.amp.autocast():
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.context.backward(self.amp.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, scaler=self.amp.scaler)
        return self.amp.update(loss, samples=len(labels))

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        inputs, labels = batch
        logits = self.model(inputs)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return {
            "validation_loss": nn.functional.cross_entropy(logits, labels),
            "accuracy": accuracy,
        }
