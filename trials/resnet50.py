"""ResNet-50 with momentum SGD, in any of the four precisions.

    det-amp train experiment_configs/resnet50/bf16.yaml             # without a cluster
    det experiment create experiment_configs/resnet50/amp.yaml .    # on a cluster

The model is torchvision's (He et al. 2016, arXiv 1512.03385), which puts the stride
into the 3 x 3 convolution. It uses channels_last, the layout that tensor cores use
for convolutions.

Shapes: B = samples of one batch on one slot, C = classes, S = image side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from determined import pytorch
from torch.nn import functional
from torchvision.models import resnet50

from determined_amp import MixedPrecision, setting
from trials.data import images, loading
from trials.hparams import Hparams
from trials.mean_metrics import MeanMetrics
from trials.schedule import LRSchedule, warmup_then


@dataclass(frozen=True)
class ResNet50Hparams(Hparams):
    """Hyperparameters of `ResNet50Trial`.

    Args:
        momentum: Momentum of SGD, without Nesterov's variant.
        label_smoothing: Used in the training loss only; validation reports the plain
            cross-entropy.
    """

    momentum: float = setting(0.9, at_least=0, below=1)
    label_smoothing: float = setting(0.0, at_least=0, below=1)


class ResNet50Trial(pytorch.PyTorchTrial):
    """Trains ResNet-50 on images of three channels, with SGD and momentum.

    Args:
        context: Determined's context of this trial.
    """

    Hparams = ResNet50Hparams
    Data = images.DataSettings

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = hparams = ResNet50Hparams.of(context)
        self.amp = MixedPrecision(context)
        self.data = data = images.DataSettings.of(context)
        self.means = MeanMetrics(context)
        # Determined's own copy would wait for the device; see `to_device`.
        context.experimental.disable_auto_to_device()
        # Each residual block starts as the identity (Goyal et al. 2017, arXiv
        # 1706.02677, section 5.1).
        model = resnet50(num_classes=data.classes, zero_init_residual=True)
        model = model.to(memory_format=torch.channels_last)
        self.model = context.wrap_model(self.amp.prepare(model))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(
                self.model.parameters(),
                lr=hparams.learning_rate,
                momentum=hparams.momentum,
                weight_decay=hparams.weight_decay,
                fused=self.amp.fused,
            )
        )

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Train on one batch: images (B, 3, S, S) uint8, labels (B,) int64."""
        images, labels = loading.to_device(batch, self.amp.device)
        with self.amp.autocast():  # forward and loss, never the backward
            logits = self.model(images)  # (B, C), autocast dtype
            loss = functional.cross_entropy(  # (), float32 even in autocast
                logits, labels, label_smoothing=self.hparams.label_smoothing
            )
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
