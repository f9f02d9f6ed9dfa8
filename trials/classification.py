"""What trials that classify images share: data, loaders, validation."""

from __future__ import annotations

from functools import cached_property

import torch
from determined import pytorch
from torch import nn

from determined_amp.amp.metrics import ClassificationMetrics, TrainingMetrics
from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.amp.schedules import AppliedStepSchedule
from determined_amp.config.experiment import Experiment
from determined_amp.config.hparams import Hparams
from trials.data import images as data
from trials.data import loading
from trials.data.loading import Images


class ImageClassification:
    """The images of one experiment and how a model is validated on them.

    Args:
        context: The trial's context.
        config: The parsed experiment.
        amp: The trial's mixed precision.
        training: Is told how long the loop waits for data.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        config: Experiment[Hparams],
        amp: MixedPrecision,
        training: TrainingMetrics,
    ) -> None:
        context.experimental.disable_auto_to_device()  # it waits for every copy
        self._context = context
        self._config = config
        self._amp = amp
        self._training = training
        self._metrics = ClassificationMetrics(context)

    @cached_property
    def images(self) -> tuple[Images, Images]:
        """Training and validation images; loaded when first asked for, not by a mere inference."""
        return data.load(self._config.data, self._context.get_trial_seed())

    def training_loader(self, optimizer: torch.optim.Optimizer) -> pytorch.DataLoader:
        """The loader, and the learning-rate schedule of `optimizer`, which needs its length."""
        loader = loading.training_loader(
            self.images[0],
            self._context.get_per_slot_batch_size(),
            self._context.get_trial_seed(),
            self._config.data.workers,
        )
        epoch = loading.batches_per_epoch(loader, self._context.distributed.size)
        rates = self._config.hparams.rates(epoch)
        self._amp.follow(AppliedStepSchedule(optimizer, rates, self._amp.device))
        return loading.timed(loader, self._training.waited)

    def validation_loader(self) -> pytorch.DataLoader:
        """Raises: DataError: if the validation images are fewer than a batch per slot needs."""
        return loading.validation_loader(
            self.images[1],
            self._context.get_per_slot_batch_size(),
            self._config.data.workers,
            self._context.distributed.size,
        )

    def evaluate(self, model: nn.Module, batch: pytorch.TorchData) -> dict[str, float]:
        """Validate `model` on one batch, in float32 unless `eval_precision` says otherwise."""
        images, labels = loading.to_device(batch, self._amp.device)
        with self._amp.eval_autocast():
            logits = model(images)
        return self._metrics.add(logits, labels)
