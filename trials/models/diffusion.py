"""The noise process of a diffusion model (Ho et al. 2020, arXiv 2006.11239).

A training batch draws its noise, timesteps and withheld labels on the device, from its
own seed, which depends on the trial's seed, the epoch and the first clip only. So the
numbers differ between ranks, but are the same after a resume, and when the guard trains
a batch again to find a fault. A validation clip draws its numbers on the host, and they
depend on its index only. So runs of any precision, seed and device are validated on the
same numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DDPMScheduler

from determined_amp.amp.fields import setting
from trials.data.augment import uniform_numbers
from trials.data.clips import VALIDATION_SEED
from trials.data.loading import Labelled, Sample


class BetaSchedule(enum.Enum):
    """How fast the noise grows; the names are those of diffusers.

    `squaredcos_cap_v2` is the cosine of Nichol and Dhariwal 2021, arXiv 2102.09672.
    """

    LINEAR = "linear"
    SCALED_LINEAR = "scaled_linear"
    COSINE = "squaredcos_cap_v2"


class Conditioning(enum.Enum):
    """What the model knows about a clip: its class, or nothing."""

    CLASS = "class"
    NONE = "none"


@dataclass(frozen=True)
class DiffusionSettings:
    """The `diffusion` section of the hyperparameters. The model predicts the noise.

    Args:
        num_train_timesteps: Number of noise levels.
        beta_schedule: How the variance that a timestep adds grows.
        beta_start: Variance of the first timestep; not for the cosine schedule.
        beta_end: Variance of the last timestep; not for the cosine schedule.
        conditioning: Whether the model learns the classes.
        class_dropout: Share of the training clips whose class is withheld. Sampling
            with classifier-free guidance needs it (Ho and Salimans 2022, arXiv
            2207.12598).
    """

    num_train_timesteps: int = setting(1000, at_least=1)
    beta_schedule: BetaSchedule = setting(BetaSchedule.LINEAR)
    beta_start: float = setting(1.0e-4, above=0, below=1)
    beta_end: float = setting(2.0e-2, above=0, below=1)
    conditioning: Conditioning = setting(Conditioning.CLASS)
    class_dropout: float = setting(0.1, at_least=0, below=1)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.beta_start > self.beta_end:
            yield (
                "beta_start",
                f"got {self.beta_start:g}, which is above beta_end {self.beta_end:g}; "
                "allowed: beta_end or less",
            )
        if self.beta_schedule is BetaSchedule.COSINE:
            for key in ("beta_start", "beta_end"):
                if key in given:
                    yield (
                        key,
                        f"given, but beta_schedule {self.beta_schedule.value} has no "
                        "such end; allowed: beta_schedule linear or scaled_linear, or "
                        "the key left out",
                    )
        if self.conditioning is Conditioning.NONE and self.class_dropout:
            yield (
                "class_dropout",
                f"got {self.class_dropout:g}, but conditioning none learns no class; "
                "allowed with it: 0.0",
            )

    def scheduler_config(self) -> dict[str, Any]:
        """The arguments for diffusers' schedulers."""
        return {
            "num_train_timesteps": self.num_train_timesteps,
            "beta_schedule": self.beta_schedule.value,
            "beta_start": self.beta_start,
            "beta_end": self.beta_end,
            "prediction_type": "epsilon",
        }


class Noised(NamedTuple):
    """Inputs and target of a denoiser.

    Args:
        clips: The noisy clips, (B, C, F, S, S), float32.
        timesteps: Their noise levels, (B,), int64.
        labels: Their classes, (B,), int64. The null label, which is the number of
            classes, stands for a withheld class.
        noise: The target, (B, C, F, S, S), float32.
    """

    clips: torch.Tensor
    timesteps: torch.Tensor
    labels: torch.Tensor
    noise: torch.Tensor


class Diffusion:
    """Adds noise to clips, always in float32 and without waiting for the device.

    Args:
        settings: The `diffusion` section.
        classes: Number of classes.
        device: Where the clips are.
    """

    def __init__(
        self, settings: DiffusionSettings, classes: int, device: torch.device
    ) -> None:
        self._timesteps = settings.num_train_timesteps
        self._null_label = classes
        self._unconditional = settings.conditioning is Conditioning.NONE
        self._dropout = 1.0 if self._unconditional else settings.class_dropout
        self._scheduler = DDPMScheduler(**settings.scheduler_config())
        # Otherwise the first batch waits while the scheduler copies this table.
        self._scheduler.alphas_cumprod = self._scheduler.alphas_cumprod.to(device)
        self._generator = torch.Generator(device)

    def for_training(
        self, clips: torch.Tensor, labels: torch.Tensor, seed: int
    ) -> Noised:
        """Add noise to a training batch, and withhold some labels, both from `seed`.

        Args:
            clips: (B, C, F, S, S), float32.
            labels: (B,), int64.
            seed: The seed of the batch, from `TrainingClips`.
        """
        draw: dict[str, Any] = {"generator": self._generator.manual_seed(seed)}
        draw["device"] = clips.device
        noise = torch.randn(clips.shape, **draw)
        timesteps = torch.randint(self._timesteps, labels.shape, **draw)
        withheld = torch.rand(labels.shape, **draw) < self._dropout
        labels = labels.masked_fill(withheld, self._null_label)
        return self._noised(clips, noise, timesteps, labels)

    def for_validation(
        self,
        clips: torch.Tensor,
        labels: torch.Tensor,
        noise: torch.Tensor,
        level: torch.Tensor,
    ) -> Noised:
        """Add noise to a batch of `ValidationClips`.

        Args:
            clips: (B, C, F, S, S), float32.
            labels: (B,), int64.
            noise: (B, C, F, S, S), float32.
            level: Noise levels, (B,), float32 in [0, 1), which become timesteps.
        """
        timesteps = (level * self._timesteps).long()
        if self._unconditional:
            labels = torch.full_like(labels, self._null_label)
        return self._noised(clips, noise, timesteps, labels)

    def _noised(
        self,
        clips: torch.Tensor,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
        labels: torch.Tensor,
    ) -> Noised:
        noisy = self._scheduler.add_noise(clips, noise, timesteps)
        return Noised(noisy, timesteps, labels, noise)


# Clips, labels, and the seed of the batch.
TrainingBatch = tuple[torch.Tensor, torch.Tensor, int]
# Clips, labels, noise and noise levels in [0, 1).
ValidationBatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class TrainingClips:
    """Training clips; each batch has a seed for its noise.

    Args:
        clips: The clips.
        seed: Seed of the trial.
    """

    def __init__(self, clips: Labelled, seed: int) -> None:
        self._clips = clips
        self._seed = seed

    def __len__(self) -> int:
        return len(self._clips)

    def __getitems__(self, samples: Sequence[Sample]) -> TrainingBatch:
        (draw,) = uniform_numbers(self._seed, samples[:1], draws=1).flatten()
        return (*self._clips.__getitems__(samples), int(draw * 2**53))


class ValidationClips:
    """Validation clips, with fixed noise and noise levels that cover [0, 1) evenly.

    Args:
        clips: The clips.
    """

    # Multiples of the golden ratio have fractional parts that cover [0, 1) evenly.
    _GOLDEN = (5**0.5 - 1) / 2

    def __init__(self, clips: Labelled) -> None:
        self._clips = clips

    def __len__(self) -> int:
        return len(self._clips)

    def __getitems__(self, samples: Sequence[Sample]) -> ValidationBatch:
        clips, labels = self._clips.__getitems__(samples)
        noise = [
            np.random.default_rng((VALIDATION_SEED, sample.image)).standard_normal(
                clips.shape[1:], dtype=np.float32
            )
            for sample in samples
        ]
        level = torch.tensor([sample.image * self._GOLDEN % 1.0 for sample in samples])
        return clips, labels, torch.from_numpy(np.stack(noise)), level
