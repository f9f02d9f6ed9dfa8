"""Six small trials with different gradients for the finder, as users would write them.

They use Determined's `PyTorchTrial`, PyTorch's `GradScaler` and `autocast`, and their
own hyperparameters, but nothing of determined_amp. All learn from scikit-learn's
handwritten digits, 8 x 8 pixels. B = samples of a batch.

| trial | what is special |
|---|---|
| `BatchNormCNN` | running statistics |
| `PreNormTransformer` | LayerNorm and attention; some gradients are never 16-bit |
| `SummedLoss` | the loss is a sum: gradients overflow at PyTorch's default, 2^16 |
| `TinyLoss` | targets of 1e-4 and less: gradients are flushed to 0 at 2^16 |
| `DeepPlain` | forty layers without normalisation: no scale fits them all |
| `Float16Loss` | the loss is computed in float16, so 2^16 itself is infinite |
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from determined import pytorch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

Batch = tuple[torch.Tensor, torch.Tensor]

TRAINING_SAMPLES = 1500

read_digits = cache(load_digits)


class SmallTrial(pytorch.PyTorchTrial):
    """PyTorch's own AMP in a trial, in a few lines.

    Hyperparameters: `global_batch_size`, `learning_rate`, and optionally `init_scale`.

    Args:
        context: Determined's context of this trial.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        self.scaler = context.wrap_scaler(
            torch.amp.GradScaler(
                context.device.type,
                init_scale=float(hparams.get("init_scale", 65536.0)),
            )
        )
        self.model = context.wrap_model(self.make_model())
        self.optimizer = context.wrap_optimizer(
            self.make_optimizer(hparams["learning_rate"])
        )
        self.skipped_steps = 0

    def make_model(self) -> nn.Module:
        raise NotImplementedError

    def make_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=learning_rate)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss, (), of a batch.

        It has images (B, 1, 8, 8) float32 in [0, 1], and labels (B,) int64.
        """
        return functional.cross_entropy(self.model(images), labels)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, Any]:
        images, labels = cast("Batch", batch)
        with torch.autocast(self.context.device.type, dtype=torch.float16):
            loss = self.loss(images, labels)
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(self.optimizer, scaler=self.scaler)
        before = self.scaler.get_scale()
        self.scaler.update()
        self.skipped_steps += self.scaler.get_scale() < before
        return {"loss": loss.item(), "skipped_steps": self.skipped_steps}

    def evaluate_batch(
        self, batch: pytorch.TorchData, batch_idx: int
    ) -> dict[str, float]:
        images, labels = cast("Batch", batch)
        return {"validation_loss": self.loss(images, labels).item()}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self._loader(slice(0, TRAINING_SAMPLES), shuffle=True)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self._loader(slice(TRAINING_SAMPLES, None), shuffle=False)

    def _loader(self, part: slice, *, shuffle: bool) -> pytorch.DataLoader:
        digits = read_digits()
        images = torch.tensor(digits.images[part, None], dtype=torch.float32) / 16.0
        labels = torch.tensor(digits.target[part])
        return pytorch.DataLoader(
            TensorDataset(images, labels),
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=shuffle,
            drop_last=shuffle,
            generator=torch.Generator().manual_seed(self.context.get_trial_seed()),
        )


class BatchNormCNN(SmallTrial):
    """Two convolutions with BatchNorm, momentum SGD."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            *(
                nn.Conv2d(1, 16, 3, padding=1, bias=False),
                nn.BatchNorm2d(16),
                nn.ReLU(),
            ),
            *(
                nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(32),
                nn.ReLU(),
            ),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )

    def make_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=learning_rate, momentum=0.9)


class PreNormTransformer(SmallTrial):
    """A transformer whose eight tokens are the rows of an image."""

    def make_model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            d_model=32,
            nhead=4,
            dim_feedforward=64,
            dropout=0.1,
            batch_first=True,
            norm_first=True,
        )
        return nn.Sequential(
            *(nn.Flatten(1, 2), nn.Linear(8, 32)),  # (B, 8 tokens, 32)
            nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False),
            *(nn.LayerNorm(32), nn.Flatten(), nn.Linear(256, 10)),
        )


class SummedLoss(SmallTrial):
    """An autoencoder whose loss is summed over pixels and samples."""

    def make_model(self) -> nn.Module:
        layers = (
            nn.Flatten(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 8),
            nn.Linear(8, 64),
        )
        return nn.Sequential(*layers)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(images).float()
        return functional.binary_cross_entropy_with_logits(
            logits, images.flatten(1), reduction="sum"
        )


class TinyLoss(SmallTrial):
    """Regression with tiny targets, so that the loss is near 1e-8.

    Adam's epsilon is small enough for such gradients.
    """

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def make_optimizer(self, learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=learning_rate, eps=1e-15)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        in_large_units = self.model(images).float().squeeze(1) * 1e-4
        return functional.mse_loss(in_large_units, labels.float() * 1e-5)


class DeepPlain(SmallTrial):
    """Each layer shrinks the gradient, so the gradients exceed float16's range."""

    def make_model(self) -> nn.Module:
        hidden = [layer for _ in range(40) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), *hidden, nn.Linear(32, 10)
        )


class Float16Loss(SmallTrial):
    """The mean absolute error in float16; the scale must become float16, too."""

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
        )

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        prediction: torch.Tensor = self.model(images)
        return (prediction - images.flatten(1).to(prediction.dtype)).abs().mean()


LEARNING_RATES: dict[type[SmallTrial], float] = {
    BatchNormCNN: 0.05,
    PreNormTransformer: 1e-3,
    SummedLoss: 1e-3,
    TinyLoss: 1e-3,
    DeepPlain: 1e-3,
    Float16Loss: 1e-3,
}


def config(
    trial: type[SmallTrial], seed: int = 0, **hyperparameters: float
) -> dict[str, Any]:
    """Make an experiment configuration for one of these trials."""
    return {
        "name": trial.__name__,
        "entrypoint": f"{trial.__module__}:{trial.__name__}",
        "hyperparameters": {
            "global_batch_size": 64,
            "learning_rate": LEARNING_RATES[trial],
            **hyperparameters,
        },
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "smaller_is_better": True,
        },
        "reproducibility": {"experiment_seed": seed},
    }
