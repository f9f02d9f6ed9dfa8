"""A 784-512-10 multilayer perceptron with Adam, in any of the four precisions.

    det-amp train experiment_configs/mlp/amp.yaml               # without a cluster
    det experiment create experiment_configs/mlp/amp.yaml .     # on a cluster

Shapes: B = samples of one batch on one slot, C = classes, S = image side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional

from determined_amp import MixedPrecision, setting
from trials.data import images, loading
from trials.hparams import Hparams
from trials.mean_metrics import MeanMetrics
from trials.schedule import LRSchedule, warmup_then


@dataclass(frozen=True)
class MLPHparams(Hparams):
    """Hyperparameters of `MLPTrial`.

    Args:
        hidden_features: Width of the hidden layer.
    """

    hidden_features: int = setting(512, at_least=1)


class MLPTrial(pytorch.PyTorchTrial):
    """Trains one hidden ReLU layer on flattened images with Adam (arXiv 1412.6980).

    Args:
        context: Determined's context of this trial.
    """

    Hparams = MLPHparams
    Data = images.DataSettings

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = hparams = MLPHparams.of(context)
        self.amp = MixedPrecision(context)
        self.data = data = images.DataSettings.of(context)
        self.means = MeanMetrics(context)
        # Determined's own copy would wait for the device; see `to_device`.
        context.experimental.disable_auto_to_device()
        model = nn.Sequential(
            nn.Flatten(),  # (B, C, S, S) -> (B, pixels)
            nn.Linear(data.channels * data.image_size**2, hparams.hidden_features),
            nn.ReLU(),
            nn.Linear(hparams.hidden_features, data.classes),
        )
        self.model = context.wrap_model(self.amp.prepare(model))
        self.optimizer = context.wrap_optimizer(
            torch.optim.Adam(
                self.model.parameters(),
                lr=hparams.learning_rate,
                weight_decay=hparams.weight_decay,
                fused=self.amp.fused,
            )
        )

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Train on one batch: images (B, 1, S, S) uint8, labels (B,) int64."""
        images, labels = loading.to_device(batch, self.amp.device)
        with self.amp.autocast():  # forward and loss, never the backward
            logits = self.model(images)  # (B, C), autocast dtype
            loss = functional.cross_entropy(logits, labels)  # float32 even in autocast
        self.context.backward(self.amp.scaler.scale(loss))  # torch's GradScaler
        # Every `aggregation_frequency` batches: unscale_, clip, scaler.step.
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=self.amp.clip(self.optimizer, self.hparams.max_norm),
            scaler=self.amp.scaler,
        )
        # Calls scaler.update(), and counts the batch for the metrics.
        return self.amp.update(loss, samples=len(labels))

    def evaluate_batch(
        self, batch: pytorch.TorchData, batch_idx: int
    ) -> dict[str, float]:
        images, labels = loading.to_device(batch, self.amp.device)
        # In float32, unless `amp.eval_precision` says otherwise.
        with self.amp.eval_autocast():
            logits = self.model(images).float()  # (B, C)
            loss = functional.cross_entropy(logits, labels, reduction="sum")
            correct = (logits.argmax(dim=1) == labels).sum()
        return self.means.add(
            {"validation_loss": loss, "validation_accuracy": correct}, len(labels)
        )

    @cached_property
    def datasets(self) -> tuple[loading.Labelled, loading.Labelled]:
        """The training and the validation images, loaded on first use."""
        return images.load(self.data, self.context.get_trial_seed(), self.amp.device)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        size, seed = (
            self.context.get_per_slot_batch_size(),
            self.context.get_trial_seed(),
        )
        loader = loading.training_loader(
            self.datasets[0], size, seed, self.data.workers
        )
        steps = self.hparams.steps(
            loading.batches_per_epoch(loader, self.context.distributed.size)
        )
        schedule, warmup = self.hparams.lr_schedule, self.hparams.warmup_steps
        if warmup or schedule is LRSchedule.COSINE:
            rate = warmup_then(self.optimizer, schedule, warmup, steps)
            self.amp.wrap_lr_scheduler(rate)  # advances on applied steps only
        return loader

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        size, slots = (
            self.context.get_per_slot_batch_size(),
            self.context.distributed.size,
        )
        return loading.validation_loader(
            self.datasets[1], size, self.data.workers, slots
        )

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        # They save the scaler and the counts, and run the guard and the audit.
        return self.amp.callbacks(self)
