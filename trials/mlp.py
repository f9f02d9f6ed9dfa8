"""A 784-512-10 multilayer perceptron with Adam, in any of the four precisions.

    python -m determined_amp train experiment_configs/mlp/amp.yaml       # without a cluster
    det experiment create experiment_configs/mlp/amp.yaml .              # on a cluster

Shapes: B = samples of one batch on one slot, C = classes, S = image side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional

from determined_amp import MixedPrecision
from determined_amp.amp.fields import setting
from trials.classification import ImageClassification
from trials.data import loading
from trials.data.images import DataSettings
from trials.hparams import Hparams
from trials.task_trial import TaskTrial


@dataclass(frozen=True)
class MLPHparams(Hparams):
    """Hyperparameters of `MLPTrial`.

    Args:
        hidden_features: Width of the hidden layer.
    """

    hidden_features: int = setting(512, at_least=1)


class MLPTrial(TaskTrial):
    """Flattened images, one hidden layer of ReLU, cross-entropy, Adam (arXiv 1412.6980).

    Args:
        context: Determined's context of this trial.
    """

    Hparams = MLPHparams
    Data = DataSettings
    hparams: MLPHparams

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = hparams = MLPHparams.of(context)
        self.amp = MixedPrecision(context)
        self.task = ImageClassification(context, self.amp)
        data = self.task.settings
        model = nn.Sequential(
            nn.Flatten(),  # (B, C, S, S) -> (B, pixels)
            nn.Linear(data.channels * data.image_size**2, hparams.hidden_features),
            nn.ReLU(),
            nn.Linear(hparams.hidden_features, data.classes),
        )
        self.model = context.wrap_model(self.amp.prepare(model))
        self.optimizer = self.wrap_optimizer(torch.optim.Adam)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Train on one batch: images (B, 1, S, S) uint8, labels (B,) int64."""
        images, labels = loading.to_device(batch, self.amp.device)
        with self.amp.autocast():  # forward and loss, never the backward
            logits = self.model(images)  # (B, C), autocast dtype
            loss = functional.cross_entropy(logits, labels)  # (), float32: autocast promotes it
        self.context.backward(self.amp.scaler.scale(loss))  # torch's GradScaler
        self.context.step_optimizer(  # scaler.step(optimizer), where a window of batches ends
            self.optimizer,
            clip_grads=self.amp.clip(self.optimizer, self.hparams.max_norm),  # after unscale_
            scaler=self.amp.scaler,
        )
        return self.amp.update(loss, samples=len(labels))  # scaler.update(), counts, metrics
