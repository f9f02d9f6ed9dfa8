"""Trials of people who have never heard of this repository: float32, names and habits
of their own.

Nothing here imports it, and nothing of it may: the file is copied into folders without
it.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

FEATURES, CLASSES, SAMPLES = 6, 3, 24


def samples(seed):
    """Points (N, FEATURES) float32 and the class (N,) int64 of each, by the largest of
    three.
    """
    points = torch.randn(
        SAMPLES, FEATURES, generator=torch.Generator().manual_seed(seed)
    )
    return TensorDataset(points, points[:, :CLASSES].argmax(1))


class Stranger(pytorch.PyTorchTrial):
    """A small classifier; its own learning rate, and a scheduler that Determined
    steps.
    """

    head: type[nn.Linear] = nn.Linear

    def __init__(self, context):
        self.context = context
        hparams = context.get_hparams()
        self.batch_size = hparams.get("batch_size", 4)
        layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Dropout(0.25), self.head(8, CLASSES)
        )
        self.model = context.wrap_model(layers)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=hparams.get("lr", 0.1))
        self.optimizer = context.wrap_optimizer(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(
            self.optimizer, step_size=2, gamma=0.5
        )
        context.wrap_lr_scheduler(
            schedule, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH
        )

    def train_batch(self, batch, epoch_idx, batch_idx):
        points, classes = batch
        loss = functional.cross_entropy(self.model(points), classes)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"train_loss": loss, "rate": self.optimizer.param_groups[0]["lr"]}

    def evaluate_full_dataset(self, data_loader):
        points, classes = (torch.cat(parts) for parts in zip(*data_loader, strict=True))
        logits = getattr(self.model, "module", self.model)(points)
        return {
            "val_loss": float(functional.cross_entropy(logits, classes)),
            "per_class": np.bincount(classes.numpy(), minlength=CLASSES),
            "note": "[not] a number",
            "group": "mine",
        }

    def build_training_data_loader(self):
        return pytorch.DataLoader(samples(0), batch_size=self.batch_size)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(samples(1), batch_size=8)


class WithHparams(Stranger):
    """As Determined's current examples."""

    def __init__(self, context, hparams):
        super().__init__(context)
        self.given = hparams


class WithLoaderProcesses(WithHparams):
    """Loads in a process of its own, with a function that only a fork of this process
    has.
    """

    def build_training_data_loader(self):
        return pytorch.DataLoader(
            samples(0),
            batch_size=self.batch_size,
            num_workers=1,
            collate_fn=lambda rows: tuple(
                torch.stack(column) for column in zip(*rows, strict=True)
            ),
        )


class Jittered(TensorDataset):
    """Each sample is disturbed anew whenever it is read: by torch, by numpy and by
    Python.
    """

    def __getitem__(self, index):
        points, labels = self.tensors
        noise = 0.1 * torch.rand(FEATURES) * np.random.rand() * random.random()
        return points[index] + noise, labels[index]


class Shuffled(Stranger):
    """The loader of most tutorials, noise in the loop, and a last batch that is
    smaller.
    """

    def build_training_data_loader(self):
        workers = self.context.get_hparams().get("workers", 0)
        data = Jittered(*samples(0).tensors)
        return pytorch.DataLoader(data, batch_size=5, shuffle=True, num_workers=workers)

    def train_batch(self, batch, epoch_idx, batch_idx):
        points, classes = batch
        points = (
            points + 0.1 * torch.randn_like(points) * random.random() * np.random.rand()
        )
        return super().train_batch((points, classes), epoch_idx, batch_idx)


class Weighted(Shuffled):
    """Draws rare classes more often, and validates on what it trains on."""

    def __init__(self, context):
        super().__init__(context)
        data = samples(0)
        drawn = WeightedRandomSampler((1 + data.tensors[1]).tolist(), SAMPLES)
        self.loader = pytorch.DataLoader(data, batch_size=4, sampler=drawn)

    def build_training_data_loader(self):
        return self.loader

    build_validation_data_loader = build_training_data_loader


class OwnOrder(Stranger):
    """Its batches come in an order that it makes itself, or in order from a worker."""

    def __init__(self, context):
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self):
        data = samples(0)
        order = list(reversed(range(SAMPLES)))
        loaders = {
            "generator": lambda: pytorch.DataLoader(
                data, 4, True, generator=torch.Generator()
            ),
            "sampler": lambda: pytorch.DataLoader(data, 4, sampler=FromEnd(order)),
            "loader": lambda: DataLoader(data, 4, shuffle=True),
            "workers": lambda: pytorch.DataLoader(data, 4, num_workers=1),
        }
        return loaders[self.context.get_hparams()["order"]]()


class FromEnd(Sampler[int]):
    """Any order, in a class of its own that has no length."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)


class WithDefaults(Stranger):
    """Needs nothing but the context."""

    def __init__(
        self,
        context,
        hparams=None,
        *others,
        verbose=False,
        **named,
    ):
        super().__init__(context)
        assert (hparams, others, verbose, named) == (None, (), False, {})


class WithTokenizer(Stranger):
    """Requires what nobody but its author can make."""

    def __init__(self, context, hparams, tokenizer):
        super().__init__(context)


class Greedy(Stranger):
    """Eats its hyperparameters."""

    def __init__(self, context, hparams):
        super().__init__(context)
        hparams.pop("lr")


class WithMarkers(Stranger):
    """Its attributes have names that mean something here, and are something else."""

    @dataclasses.dataclass
    class Hparams:
        """No settings class of the library."""

        layers: list[int]

    @dataclasses.dataclass
    class Data:
        """Nor this."""

        path: str = "nowhere"


class WithBatchSize(Stranger):
    """Asks for what only a YAML with `global_batch_size` has."""

    def __init__(self, context):
        super().__init__(context)
        self.batch_size = context.get_per_slot_batch_size()


class WithoutData(Stranger):
    """Its filter has left nothing."""

    def build_training_data_loader(self):
        return pytorch.DataLoader(TensorDataset(torch.empty(0, FEATURES)), batch_size=4)


class WithoutValidationData(Stranger):
    """Holds nothing back."""

    evaluate_full_dataset = pytorch.PyTorchTrial.evaluate_full_dataset
    build_validation_data_loader = WithoutData.build_training_data_loader

    def evaluate_batch(self, batch, batch_idx):
        return {"val_loss": 0.0}


class WithMuon(Stranger):
    """Steps by an optimizer that multiplies in bfloat16."""

    def __init__(self, context):
        super().__init__(context)
        context.optimizers.clear()
        self.optimizer = context.wrap_optimizer(
            Multiplies(self.model.parameters(), {"lr": 0.1})
        )


class Multiplies(torch.optim.Optimizer):
    def step(self, closure=None):
        torch.ones(2, 3, dtype=torch.bfloat16) @ torch.ones(3, 5, dtype=torch.bfloat16)


class WithMask(Stranger):
    """Masks with the constant of most hand-written attention, which is beyond
    float16.
    """

    class head(nn.Linear):  # noqa: N801
        def forward(self, points):
            return super().forward(points).masked_fill(points[:, :CLASSES] > 9, -1e9)


class Loud(Stranger):
    """Its activations are beyond float16, and a norm brings them back."""

    class head(nn.Linear):  # noqa: N801
        def forward(self, points):
            loud = super().forward(1.0e5 + points)
            return functional.layer_norm(loud, loud.shape[-1:])


class WithoutParameters(Stranger):
    """Forgot to thaw its model."""

    def __init__(self, context):
        super().__init__(context)
        self.model.requires_grad_(False)


def make(context, hparams):
    """A trial from a function, as one writes it for a constructor that wants more."""
    assert "lr" in hparams
    return Stranger(context)


def make_nothing(context):
    """Forgets the return."""


def make_without():
    """Takes no context."""
