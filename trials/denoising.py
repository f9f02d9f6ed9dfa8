"""Denoising of video clips, the task of Latte."""

from __future__ import annotations

from typing import Any

import torch
from determined import pytorch
from torch.nn import functional

from determined_amp import MixedPrecision
from trials.data import clips
from trials.models.diffusion import Diffusion, DiffusionSettings, TrainingClips, ValidationClips
from trials.task import Model, Task


class ClipDenoising(Task[clips.ClipSettings]):
    """Reports `validation_loss`, the mean squared error of the noise; predicting 0 would give 1.

    Attributes:
        diffusion: Adds the noise.
    """

    settings_class = clips.ClipSettings

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        amp: MixedPrecision,
        diffusion: DiffusionSettings,
    ) -> None:
        super().__init__(context, amp)
        self.diffusion = Diffusion(diffusion, self.settings.classes, amp.device)

    def load(self, seed: int) -> tuple[TrainingClips, ValidationClips]:
        train, validation = clips.load(self.settings, seed)
        return TrainingClips(train, seed), ValidationClips(validation)

    def validation_sums(self, model: Model, batch: Any) -> dict[str, torch.Tensor]:
        noised = self.diffusion.for_validation(*batch)
        noise = model(noised.clips, noised.timesteps, noised.labels)
        error = functional.mse_loss(noise.float(), noised.noise)
        return {"validation_loss": error.double() * len(noise)}
