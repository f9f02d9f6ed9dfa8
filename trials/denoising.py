"""What trials that denoise clips share: data, loaders, noise, validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from determined import pytorch
from torch.nn import functional

from determined_amp.amp.metrics import TrainingMetrics
from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.amp.schedules import AppliedStepSchedule
from trials.data import clips, loading
from trials.models.diffusion import (
    Diffusion,
    DiffusionSettings,
    TrainingClips,
    ValidationClips,
    to_device,
)


class ClipDenoising:
    """The clips of one experiment, the noise on them, and how a denoiser is validated.

    Args:
        context: The trial's context.
        config: The parsed experiment; its hyperparameters have a `diffusion` section.
        amp: The trial's mixed precision.
        training: Is told how long the loop waits for data.

    Attributes:
        diffusion: Adds the noise.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        config: Any,
        amp: MixedPrecision,
        training: TrainingMetrics,
    ) -> None:
        context.experimental.disable_auto_to_device()  # it waits for every copy
        settings: DiffusionSettings = config.hparams.diffusion
        self.diffusion = Diffusion(settings, config.data.classes, amp.device)
        self._context = context
        self._config = config
        self._amp = amp
        self._training = training
        self._metrics = DenoisingMetrics(context)

    @cached_property
    def clips(self) -> tuple[clips.Clips, clips.Clips]:
        """Training and validation clips; loaded when first asked for, not by a mere inference."""
        return clips.load(self._config.data, self._context.get_trial_seed())

    def training_loader(self, optimizer: torch.optim.Optimizer) -> pytorch.DataLoader:
        """The loader, and the learning-rate schedule of `optimizer`, which needs its length."""
        seed = self._context.get_trial_seed()
        loader = loading.training_loader(
            TrainingClips(self.clips[0], seed),
            self._context.get_per_slot_batch_size(),
            seed,
            self._config.data.workers,
        )
        epoch = loading.batches_per_epoch(loader, self._context.distributed.size)
        rates = self._config.hparams.rates(epoch)
        self._amp.follow(AppliedStepSchedule(optimizer, rates, self._amp.device))
        return loading.timed(loader, self._training.waited)

    def validation_loader(self) -> pytorch.DataLoader:
        """Raises: DataError: if the validation clips are fewer than a batch per slot needs."""
        return loading.validation_loader(
            ValidationClips(self.clips[1]),
            self._context.get_per_slot_batch_size(),
            self._config.data.workers,
            self._context.distributed.size,
        )

    def evaluate(
        self, model: Callable[..., torch.Tensor], batch: pytorch.TorchData
    ) -> dict[str, float]:
        """Validate `model` on one batch, in float32 unless `eval_precision` says otherwise."""
        noised = self.diffusion.for_validation(*to_device(batch, self._amp.device))
        with self._amp.eval_autocast():
            noise = model(noised.clips, noised.timesteps, noised.labels)
        return self._metrics.add(noise, noised.noise)


class DenoisingMetrics(pytorch.MetricReducer):
    """`validation_loss`, the mean squared error of the predicted noise; that of 0 would be 1.

    Args:
        context: The trial's context; registers itself there.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=context.device)
        self._samples = 0
        context.wrap_reducer(self, for_training=False)

    def add(self, predicted: torch.Tensor, noise: torch.Tensor) -> dict[str, float]:
        """Count one batch; computed in float32. No synchronisation.

        Args:
            predicted: (B, C, F, S, S), any floating dtype.
            noise: (B, C, F, S, S), float32.

        Returns:
            What `evaluate_batch` must return: nothing, the reducer reports.
        """
        self._sum.add_(functional.mse_loss(predicted.float(), noise), alpha=len(noise))
        self._samples += len(noise)
        return {}

    def reset(self) -> None:
        self._sum.zero_()
        self._samples = 0

    def per_slot_reduce(self) -> tuple[float, int]:
        return float(self._sum), self._samples

    def cross_slot_reduce(self, per_slot_metrics: list[tuple[float, int]]) -> dict[str, Any]:
        total, samples = (sum(column) for column in zip(*per_slot_metrics, strict=True))
        return {"validation_loss": total / samples if samples else math.nan}
