"""Float32 trials of many shapes, as people write them: nothing here knows of mixed precision.

Nothing here imports the repository, and nothing of it may: the file is copied into other folders.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

SAMPLES, CLASSES, WORDS, LENGTH = 64, 4, 16, 8


def random(*shape: int) -> torch.Tensor:
    """The same numbers each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Shape(pytorch.PyTorchTrial):
    """One model, one optimizer; what differs is the model and the data."""

    samples: tuple[int, ...] = (SAMPLES, 3, 8, 8)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(self.net())
        self.optimizer = context.wrap_optimizer(torch.optim.AdamW(self.model.parameters(), 1e-3))

    def net(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(inputs), classes)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(*batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.loss(*batch)}

    def data(self) -> TensorDataset:
        return TensorDataset(random(*self.samples), torch.arange(SAMPLES) % CLASSES)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(self.data(), self.context.get_per_slot_batch_size())

    build_validation_data_loader = build_training_data_loader


class Images(Shape):
    """An image classifier with convolutions and batch norm."""

    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(72, 4),
        )


class SlowData(Images):
    """Its data take long to make, as a data set that is tokenized first.

    Attributes:
        start: Seconds for the data.
        batch: Seconds for a batch.
    """

    start, batch = 1.5, 0.0

    def data(self) -> TensorDataset:
        time.sleep(self.start)
        return super().data()

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(super().data(), self.context.get_per_slot_batch_size())


class SlowBatches(SlowData):
    """Its batches are slow, too."""

    start, batch = 4.0, 0.2

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        time.sleep(self.batch)
        return super().train_batch(batch, epoch_idx, batch_idx)


class Gan(Shape):
    """Two models, two optimizers, a loss of logits outside the models."""

    samples = (SAMPLES, 8)

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.generator = context.wrap_model(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 8)))
        self.critic = context.wrap_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)))
        self.optimizers = [
            context.wrap_optimizer(torch.optim.Adam(model.parameters(), 1e-3))
            for model in (self.generator, self.critic)
        ]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        real = batch[0]
        made = self.generator(random(len(real), 4))
        fooled = self.critic(made)
        generator_loss = functional.binary_cross_entropy_with_logits(
            fooled, torch.ones_like(fooled)
        )
        self.context.backward(generator_loss)
        self.context.step_optimizer(self.optimizers[0])
        self.optimizers[1].zero_grad()
        yes, no = self.critic(real), self.critic(made.detach())
        critic_loss = functional.binary_cross_entropy_with_logits(
            torch.cat([yes, no]), torch.cat([torch.ones_like(yes), torch.zeros_like(no)])
        )
        self.context.backward(critic_loss)
        self.context.step_optimizer(self.optimizers[1])
        return {"generator_loss": generator_loss, "critic_loss": critic_loss}

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.critic(batch[0]).mean()}


class Language(Shape):
    """A small transformer over words, a schedule, and one pass over the whole validation set."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        warm: Any = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 4)
        )
        context.wrap_lr_scheduler(warm, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)

    def net(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        return nn.Sequential(
            nn.Embedding(WORDS, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, WORDS)
        )

    def loss(self, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        logits = self.model(inputs[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten())

    def data(self) -> TensorDataset:
        words = random(SAMPLES, LENGTH).mul(8).abs().long().clamp_(max=WORDS - 1)
        return TensorDataset(words, words[:, 0])

    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # none

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        losses = [self.loss(*batch) for batch in data_loader]
        return {"validation_loss": float(torch.stack(losses).mean())}


@dataclasses.dataclass
class Output:
    """What a model returns."""

    logits: torch.Tensor
    hidden: torch.Tensor


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(192, 16), nn.Linear(16, CLASSES)

    def hidden_and_logits(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(inputs.flatten(1))
        return hidden, self.head(hidden)


class _Dictionary(_Heads):
    def forward(self, inputs: torch.Tensor) -> dict[str, Any]:
        hidden, logits = self.hidden_and_logits(inputs)
        return {"logits": logits, "hidden": (hidden,)}


class _Dataclass(_Heads):
    def forward(self, inputs: torch.Tensor) -> Output:
        hidden, logits = self.hidden_and_logits(inputs)
        return Output(logits, hidden)


class Dictionary(Shape):
    """The model returns a dictionary, and the loss uses two parts of it."""

    def net(self) -> nn.Module:
        return _Dictionary()

    def loss(self, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        found = self.model(inputs)
        assert found["hidden"][0].dtype is found["logits"].dtype is torch.float32
        penalty: torch.Tensor = found["hidden"][0].pow(2).mean()
        return functional.cross_entropy(found["logits"], classes) + penalty


class Dataclass(Shape):
    """The model returns a dataclass."""

    def net(self) -> nn.Module:
        return _Dataclass()

    def loss(self, inputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        found = self.model(inputs)
        assert found.hidden.dtype is found.logits.dtype is torch.float32
        return functional.cross_entropy(found.logits, classes)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        squared: torch.Tensor = x * x
        return squared

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        grown: torch.Tensor = 2 * x * gradient
        return grown


class _Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, 16), nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(_Square.apply(self.first(inputs.flatten(1))))
        return found


class OwnFunction(Shape):
    """A model with an autograd function of its own."""

    def net(self) -> nn.Module:
        return _Squared()


class _Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loud, self.norm = nn.Linear(192, 16), nn.LayerNorm(16)
        self.last = nn.Linear(16, CLASSES)
        nn.init.constant_(self.loud.weight, 1e4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.loud(inputs.flatten(1))))
        return found


class Loud(Shape):
    """Its activations are beyond float16, and a norm brings them back."""

    def net(self) -> nn.Module:
        return _Loud()
