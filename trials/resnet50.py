"""ResNet-50 with momentum SGD, in any of the four precisions.

    python -m determined_amp train experiment_configs/resnet50/bf16.yaml      # without a cluster
    det experiment create experiment_configs/resnet50/amp.yaml .              # on a cluster

The model is torchvision's (He et al. 2016, arXiv 1512.03385; stride in the 3 x 3 convolution), in
channels_last, the layout that tensor cores use for convolutions.

Shapes: B = samples of one batch on one slot, C = classes, S = image side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from determined import pytorch
from torch.nn import functional
from torchvision.models import resnet50

from determined_amp import MixedPrecision
from determined_amp.amp.fields import setting
from trials.classification import ImageClassification
from trials.data import loading
from trials.data.images import DataSettings
from trials.hparams import Hparams
from trials.task_trial import TaskTrial


@dataclass(frozen=True)
class ResNet50Hparams(Hparams):
    """Hyperparameters of `ResNet50Trial`.

    Args:
        momentum: Momentum of SGD, without Nesterov's variant.
        label_smoothing: For the training loss only; validation reports the plain cross-entropy.
    """

    momentum: float = setting(0.9, at_least=0, below=1)
    label_smoothing: float = setting(0.0, at_least=0, below=1)


class ResNet50Trial(TaskTrial):
    """Images of three channels, cross-entropy, SGD with momentum.

    Args:
        context: Determined's context of this trial.
    """

    Hparams = ResNet50Hparams
    Data = DataSettings
    hparams: ResNet50Hparams

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = hparams = ResNet50Hparams.of(context)
        self.amp = MixedPrecision(context)
        self.task = ImageClassification(context, self.amp)
        # Residual branches begin as identities (Goyal et al. 2017, arXiv 1706.02677, section 5.1).
        model = resnet50(num_classes=self.task.settings.classes, zero_init_residual=True)
        model = model.to(memory_format=torch.channels_last)
        self.model = context.wrap_model(self.amp.prepare(model))
        self.optimizer = self.wrap_optimizer(torch.optim.SGD, momentum=hparams.momentum)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Train on one batch: images (B, 3, S, S) uint8, labels (B,) int64."""
        images, labels = loading.to_device(batch, self.amp.device)
        with self.amp.autocast():  # forward and loss, never the backward
            logits = self.model(images)  # (B, C), autocast dtype
            loss = functional.cross_entropy(  # (), float32: autocast promotes it
                logits, labels, label_smoothing=self.hparams.label_smoothing
            )
        self.context.backward(self.amp.scaler.scale(loss))  # torch's GradScaler
        self.context.step_optimizer(  # scaler.step(optimizer), where a window of batches ends
            self.optimizer,
            clip_grads=self.amp.clip(self.optimizer, self.hparams.max_norm),  # after unscale_
            scaler=self.amp.scaler,
        )
        return self.amp.update(loss, samples=len(labels))  # scaler.update(), counts, metrics
