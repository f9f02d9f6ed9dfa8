"""Float32 trials as people write them, for commands that are slow: nothing here knows
of AMP.

Nothing here imports the repository, and nothing of it may: the file is copied into
other folders.
"""

from __future__ import annotations

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SAMPLES, CLASSES = 64, 4


class Images(pytorch.PyTorchTrial):
    """An image classifier with convolutions and batch norm."""

    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(self.net())
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(self.model.parameters(), 1e-3)
        )

    def net(self):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(72, CLASSES),
        )

    def loss(self, inputs, classes):
        return functional.cross_entropy(self.model(inputs), classes)

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = self.loss(*batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": self.loss(*batch)}

    def data(self):
        images = torch.randn(
            SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1)
        )
        return TensorDataset(images, torch.arange(SAMPLES) % CLASSES)

    def build_training_data_loader(self):
        return pytorch.DataLoader(self.data(), self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader


class Loud(Images):
    """Its activations are beyond float16, and a norm brings them back."""

    def net(self):
        model = nn.Sequential(nn.Flatten())
        loud = nn.Linear(192, 16)
        nn.init.constant_(loud.weight, 1e4)
        model.add_module("loud", loud)
        return model.append(nn.LayerNorm(16)).append(nn.Linear(16, CLASSES))
