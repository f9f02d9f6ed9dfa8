"""ResNet-50 with momentum SGD, in any of the four precisions.

    python -m determined_amp train experiment_configs/resnet50/bf16.yaml      # without a cluster
    det experiment create experiment_configs/resnet50/amp.yaml .      # on a cluster

The model is torchvision's (He et al. 2016, arXiv 1512.03385; stride in the 3 x 3 convolution), in
channels_last, the layout that tensor cores convolve in.

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
from torchvision.models import resnet50

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
class ResNet50Hparams(Hparams):
    """Hyperparameters of `ResNet50Trial`.

    Args:
        momentum: Of SGD; Nesterov's variant is not used.
        label_smoothing: Of the training loss only; validation reports the plain cross-entropy.
    """

    momentum: float = setting(0.9, at_least=0, below=1)
    label_smoothing: float = setting(0.0, at_least=0, below=1)


class ResNet50Trial(pytorch.PyTorchTrial):
    """Images of three channels, cross-entropy, SGD with momentum.

    Metrics: see `TrainingMetrics` and `ClassificationMetrics`.

    Args:
        context: Determined's context of this trial.
        config: The parsed experiment; read from the context if left out.
    """

    Hparams = ResNet50Hparams

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        config: experiment.Experiment[ResNet50Hparams] | None = None,
    ) -> None:
        self.context = context
        self.config = config or experiment.of_context(context)
        self.hparams = hparams = self.config.hparams
        self.amp = MixedPrecision(
            context, hparams.amp, hparams.aggregation_frequency, hparams.training.cudnn_benchmark
        )
        self.scaler = self.amp.scaler
        # Residual branches begin as identities (Goyal et al. 2017, arXiv 1706.02677, section 5.1).
        model = resnet50(num_classes=self.config.data.classes, zero_init_residual=True)
        model = model.to(memory_format=torch.channels_last)
        self.model = context.wrap_model(self.amp.with_islands(model))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(
                self.model.parameters(),
                lr=hparams.learning_rate,
                momentum=hparams.momentum,
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
        """Train on one batch: images (B, 3, S, S) float32, labels (B,) int64."""
        images, labels = self.guard.watch(loading.to_device(batch, self.amp.device))
        with self.amp.autocast():  # forward and loss, never the backward
            logits = self.model(images)  # (B, C), autocast dtype
            loss = functional.cross_entropy(  # (), float32: autocast promotes it
                logits, labels, label_smoothing=self.hparams.label_smoothing
            )
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
