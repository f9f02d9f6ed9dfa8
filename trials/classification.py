"""Image classification, the task of the MLP and of ResNet-50."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from trials.data import images
from trials.data.loading import Labelled
from trials.task import Model, Task


class ImageClassification(Task[images.DataSettings]):
    """Reports `validation_loss`, cross-entropy in nats, and `validation_accuracy` in [0, 1]."""

    settings_class = images.DataSettings

    def load(self, seed: int) -> tuple[Labelled, Labelled]:
        return images.load(self.settings, seed, self._amp.device)

    def validation_sums(self, model: Model, batch: Any) -> dict[str, torch.Tensor]:
        pictures, labels = batch
        logits = model(pictures).float()  # (B, classes)
        return {
            "validation_loss": functional.cross_entropy(logits, labels, reduction="sum"),
            "validation_accuracy": (logits.argmax(dim=1) == labels).sum(),
        }
