"""What trials that denoise clips share: data, loaders, noise, validation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from determined import pytorch
from torch.nn import functional

from determined_amp import MixedPrecision
from trials.data import clips, loading
from trials.models.diffusion import (
    Diffusion,
    DiffusionSettings,
    TrainingClips,
    ValidationClips,
    to_device,
)
from trials.validation import MeanMetrics


class ClipDenoising(loading.Loaders):
    """The clips of one experiment, the noise on them, and how a denoiser is validated.

    Args:
        context: The trial's context.
        diffusion: The `diffusion` section of the hyperparameters.
        amp: The trial's mixed precision.

    Attributes:
        settings: The `data` section.
        diffusion: Adds the noise.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        diffusion: DiffusionSettings,
        amp: MixedPrecision,
    ) -> None:
        self.settings = loading.data_section(clips.ClipSettings, context)
        super().__init__(context, self.settings.workers)
        self.diffusion = Diffusion(diffusion, self.settings.classes, amp.device)
        self._amp = amp
        self._metrics = MeanMetrics(context)

    def load(self, seed: int) -> tuple[loading.Samples, loading.Samples]:
        train, validation = clips.load(self.settings, seed)
        return TrainingClips(train, seed), ValidationClips(validation)

    def evaluate(
        self, model: Callable[..., torch.Tensor], batch: pytorch.TorchData
    ) -> dict[str, float]:
        """Validate on one batch, in float32 unless `eval_precision` says otherwise.

        Reports `validation_loss`, the mean squared error of the noise; that of 0 would be 1.
        """
        noised = self.diffusion.for_validation(*to_device(batch, self._amp.device))
        with self._amp.eval_autocast():
            noise = model(noised.clips, noised.timesteps, noised.labels)
        error = functional.mse_loss(noise.float(), noised.noise)
        samples = len(noised.noise)
        return self._metrics.add({"validation_loss": error.double() * samples}, samples)
