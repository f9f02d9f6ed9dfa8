"""A 784-512-10 multilayer perceptron with Adam, in any of the four precisions.

    python -m determined_amp train experiment_configs/mlp/amp.yaml       # without a cluster
    det experiment create experiment_configs/mlp/amp.yaml .      # on a cluster

Shapes: B = samples of one batch on one slot, C = classes, S = image side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional

from determined_amp.amp.checkpoint import PortableCheckpoint
from determined_amp.amp.guard import Guard
from determined_amp.amp.metrics import TrainingMetrics
from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.config import experiment
from determined_amp.config.hparams import Hparams
from determined_amp.config.settings import setting
from trials.classification import ImageClassification
from trials.data import loading


@dataclass(frozen=True)
class MLPHparams(Hparams):
    """Hyperparameters of `MLPTrial`.

    Args:
        hidden_features: Width of the hidden layer.
    """

    hidden_features: int = setting(512, at_least=1)


class MLPTrial(pytorch.PyTorchTrial):
    """Flattened images, one hidden layer of ReLU, cross-entropy, Adam (arXiv 1412.6980).

    Metrics: see `TrainingMetrics` and `ClassificationMetrics`.

    Args:
        context: Determined's context of this trial.
        config: The parsed experiment; read from the context if left out.
    """

    Hparams = MLPHparams

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        config: experiment.Experiment[MLPHparams] | None = None,
    ) -> None:
        self.context = context
        self.config = config or experiment.of_context(context)
        self.hparams = hparams = self.config.hparams
        self.amp = MixedPrecision(
            context, hparams.amp, hparams.aggregation_frequency, hparams.training.cudnn_benchmark
        )
        self.scaler = self.amp.scaler
        pixels = self.config.data.channels * self.config.data.image_size**2
        model = nn.Sequential(
            nn.Flatten(),  # (B, C, S, S) -> (B, pixels)
            nn.Linear(pixels, hparams.hidden_features),
            nn.ReLU(),
            nn.Linear(hparams.hidden_features, self.config.data.classes),
        )
        self.model = context.wrap_model(self.amp.with_islands(model))
        self.optimizer = context.wrap_optimizer(
            torch.optim.Adam(
                self.model.parameters(),
                lr=hparams.learning_rate,
                weight_decay=hparams.weight_decay,
                fused=self.amp.fused,
            ),
            average_aggregated_gradients=False,  # the loss is divided instead: one kernel, not many
        )
        self.metrics = TrainingMetrics(context, self.amp)
        self.guard = Guard(
            context, self.amp, self.model, self.train_batch, self.config.platform.searcher
        )
        self.task = ImageClassification(context, self.config, self.amp, self.metrics)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Train on one batch: images (B, 1, S, S) float32, labels (B,) int64."""
        images, labels = self.guard.watch(loading.to_device(batch, self.amp.device))
        with self.amp.autocast():  # forward and loss, never the backward
            logits = self.model(images)  # (B, C), autocast dtype
            loss = functional.cross_entropy(logits, labels)  # (), float32: autocast promotes it
        self.context.backward(self.scaler.scale(self.amp.share_of_step(loss)))
        if self.amp.is_update_batch(batch_idx):
            self.context.step_optimizer(
                self.optimizer, clip_grads=self.clip_gradients, scaler=self.scaler
            )
            self.scaler.update()
            self.amp.count_step()
        return self.metrics.add(loss, len(labels))

    def clip_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called by `step_optimizer`, after accumulation: unscale first, or the clip is wrong."""
        self.metrics.add_scaled_gradients(parameters)
        self.scaler.unscale_(self.optimizer)
        max_norm = self.hparams.max_grad_norm or math.inf
        self.metrics.add_grad_norm(nn.utils.clip_grad_norm_(parameters, max_norm))

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return self.task.evaluate(self.model, batch)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.task.training_loader(self.optimizer)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.task.validation_loader()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {
            "mixed_precision": self.amp,
            "guard": self.guard,
            "portable_checkpoint": PortableCheckpoint(),
        }
