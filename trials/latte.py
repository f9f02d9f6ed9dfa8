"""Latte, a video diffusion transformer, with EMA, in any of the four precisions.

    det-amp train experiment_configs/latte/fp32.yaml            # without a cluster
    det experiment create experiment_configs/latte/amp.yaml .   # on a cluster
    python -m trials.sample runs/latte-fp32/TIME                # clips, as GIF and PNG

Shapes: B = samples of one batch on one slot, C = channels, F = frames, S = side of a
frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from determined import pytorch
from torch.nn import functional

from determined_amp import MixedPrecision, setting
from trials.data import clips, loading
from trials.ema import EMAWeights
from trials.hparams import Hparams
from trials.mean_metrics import MeanMetrics
from trials.models.denoiser import Denoiser, DenoiserSettings
from trials.models.diffusion import (
    Diffusion,
    DiffusionSettings,
    TrainingClips,
    ValidationClips,
)
from trials.schedule import LRSchedule, warmup_then


@dataclass(frozen=True, kw_only=True)
class LatteHparams(Hparams):
    """Hyperparameters of `LatteTrial`.

    Args:
        model: Size of the transformer.
        diffusion: Noise and conditioning.
        gradient_checkpointing: See `Denoiser`.
        ema_decay: Share of the old average that an applied step keeps, after the
            warm-up of `EMAWeights`.
        clip_start_step: Number of optimizer steps before `max_grad_norm` takes effect;
            skipped steps count.
    """

    model: DenoiserSettings = setting()
    diffusion: DiffusionSettings = setting()
    gradient_checkpointing: bool = setting(False)
    ema_decay: float = setting(0.9999, at_least=0, below=1)
    clip_start_step: int = setting(0, at_least=0)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(given)
        if self.clip_start_step and self.max_grad_norm is None:
            said = (
                f"got {self.clip_start_step}, but nothing is clipped; allowed: 0, or"
                " max_grad_norm"
            )
            yield "clip_start_step", said


class LatteTrial(pytorch.PyTorchTrial):
    """Learns to predict the noise in video clips, with AdamW (arXiv 1711.05101).

    The loss is the mean squared error of the predicted noise. Validation uses the
    averaged weights; a prediction of 0 would have a `validation_loss` of about 1.

    Args:
        context: Determined's context of this trial.
    """

    Hparams = LatteHparams
    Data = clips.ClipSettings

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.hparams = hparams = LatteHparams.of(context)
        self.amp = MixedPrecision(context)
        self.data = data = clips.ClipSettings.of(context)
        self.means = MeanMetrics(context)
        # it waits for every copy; see to_device
        context.experimental.disable_auto_to_device()
        self.diffusion = Diffusion(hparams.diffusion, data.classes, self.amp.device)
        model = Denoiser(
            hparams.model, data, gradient_checkpointing=hparams.gradient_checkpointing
        )
        self.model = context.wrap_model(self.amp.prepare(model))
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(
                self.model.parameters(),
                lr=hparams.learning_rate,
                weight_decay=hparams.weight_decay,
                fused=self.amp.fused,
            )
        )
        self.ema = EMAWeights(self.model, self.amp, hparams.ema_decay)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Train on one batch.

        It has clips (B, C, F, S, S) float32, labels (B,) int64, and a seed.
        """
        videos, labels, seed = loading.to_device(batch, self.amp.device)
        noised = self.diffusion.for_training(videos, labels, seed)
        with self.amp.autocast():  # forward and loss, never the backward
            # The predicted noise, in the autocast dtype.
            noise = self.model(noised.clips, noised.timesteps, noised.labels)
            # (), float32 even in autocast
            loss = functional.mse_loss(noise, noised.noise)
        self.context.backward(self.amp.scaler.scale(loss))  # torch's GradScaler
        # Every `aggregation_frequency` batches: unscale_, clip, scaler.step.
        self.context.step_optimizer(
            self.optimizer,
            clip_grads=self.amp.clip(self.optimizer, self.max_norm()),
            scaler=self.amp.scaler,
        )
        # Calls scaler.update(), and counts the batch for the metrics.
        metrics = self.amp.update(loss, samples=len(labels))
        self.ema.step()
        return metrics

    def max_norm(self) -> float:
        too_early = self.amp.attempted_steps < self.hparams.clip_start_step
        return math.inf if too_early else self.hparams.max_norm

    def evaluate_batch(
        self, batch: pytorch.TorchData, batch_idx: int
    ) -> dict[str, float]:
        noised = self.diffusion.for_validation(
            *loading.to_device(batch, self.amp.device)
        )
        # In float32, unless `amp.eval_precision` says otherwise.
        with self.amp.eval_autocast():
            noise = self.ema(noised.clips, noised.timesteps, noised.labels)
            error = functional.mse_loss(noise.float(), noised.noise)
        return self.means.add(
            {"validation_loss": error.double() * len(noise)}, len(noise)
        )

    @cached_property
    def datasets(self) -> tuple[TrainingClips, ValidationClips]:
        """The training and the validation clips, loaded on first use."""
        seed = self.context.get_trial_seed()
        train, validation = clips.load(self.data, seed)
        return TrainingClips(train, seed), ValidationClips(validation)

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
        return {**self.amp.callbacks(self), "ema": self.ema}
