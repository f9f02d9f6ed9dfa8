"""Latte, a video diffusion transformer with EMA and gradient checkpointing, in four precisions.

    python -m determined_amp train experiment_configs/latte/fp32.yaml      # without a cluster
    det experiment create experiment_configs/latte/amp.yaml .      # on a cluster
    python -m trials.sample runs/latte-fp32/TIME                   # a clip, as GIF and as PNG

Shapes: B = samples of one batch on one slot, C = channels, F = frames, S = side of a frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional

from determined_amp.amp.checkpoint import PortableCheckpoint
from determined_amp.amp.ema import EMAWeights
from determined_amp.amp.guard import Guard
from determined_amp.amp.metrics import TrainingMetrics
from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.config import experiment
from determined_amp.config.hparams import Hparams
from determined_amp.config.settings import ConfigError, setting
from trials.data.clips import ClipSettings
from trials.denoising import ClipDenoising
from trials.models.denoiser import Denoiser, DenoiserSettings
from trials.models.diffusion import DiffusionSettings, to_device


@dataclass(frozen=True, kw_only=True)
class LatteHparams(Hparams):
    """Hyperparameters of `LatteTrial`.

    Args:
        model: Size of the transformer.
        diffusion: Noise and conditioning.
        gradient_checkpointing: Less memory for about a third more products; see `Denoiser`.
        ema_decay: Share of the averaged weights that an optimizer step keeps.
        clip_start_step: Optimizer steps before `max_grad_norm` takes effect; skipped ones count.
    """

    model: DenoiserSettings = setting()
    diffusion: DiffusionSettings = setting()
    gradient_checkpointing: bool = setting(False)
    ema_decay: float = setting(0.9999, at_least=0, below=1)
    clip_start_step: int = setting(0, at_least=0)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(given)
        if self.clip_start_step and self.max_grad_norm is None:
            yield (
                "clip_start_step",
                f"got {self.clip_start_step}, but nothing is clipped; "
                "allowed: with max_grad_norm, or 0",
            )


class LatteTrial(pytorch.PyTorchTrial):
    """Clips of video, mean squared error of the predicted noise, AdamW (arXiv 1711.05101).

    Metrics: see `TrainingMetrics` and `DenoisingMetrics`. Validation uses the averaged weights.

    Args:
        context: Determined's context of this trial.
        config: The parsed experiment; read from the context if left out.

    Raises:
        ConfigError: if the frames cannot be cut into patches.
    """

    Hparams = LatteHparams
    Data = ClipSettings

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        config: experiment.Experiment[LatteHparams] | None = None,
    ) -> None:
        self.context = context
        self.config = config or experiment.of_context(context)
        self.hparams = hparams = self.config.hparams
        self.amp = MixedPrecision(
            context, hparams.amp, hparams.aggregation_frequency, hparams.training.cudnn_benchmark
        )
        self.scaler = self.amp.scaler
        self.model = context.wrap_model(self.amp.with_islands(make_denoiser(self.config)))
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(
                self.model.parameters(),
                lr=hparams.learning_rate,
                weight_decay=hparams.weight_decay,
                fused=self.amp.fused,
            ),
            average_aggregated_gradients=False,  # the loss is divided instead: one kernel, not many
        )
        self.ema = EMAWeights(self.model, self.amp, hparams.ema_decay)
        self.metrics = TrainingMetrics(context, self.amp)
        self.guard = Guard(
            context, self.amp, self.model, self.train_batch, self.config.platform.searcher
        )
        self.task = ClipDenoising(context, self.config, self.amp, self.metrics)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        """Train on one batch: clips (B, C, F, S, S) float32, labels (B,) int64, a seed."""
        clips, labels, seed = self.guard.watch(to_device(batch, self.amp.device))
        noised = self.task.diffusion.for_training(clips, labels, seed)
        with self.amp.autocast():  # forward and loss, never the backward
            noise = self.model(noised.clips, noised.timesteps, noised.labels)  # autocast dtype
            loss = functional.mse_loss(noise, noised.noise)  # (), float32: autocast promotes it
        self.context.backward(self.scaler.scale(self.amp.share_of_step(loss)))
        if self.amp.is_update_batch(batch_idx):
            self.context.step_optimizer(
                self.optimizer, clip_grads=self.clip_gradients, scaler=self.scaler
            )
            self.scaler.update()
            self.amp.count_step()
            self.ema.step()
        return self.metrics.add(loss, len(labels))

    def clip_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called by `step_optimizer`, after accumulation: unscale first, or the clip is wrong."""
        self.metrics.add_scaled_gradients(parameters)
        self.scaler.unscale_(self.optimizer)
        clips = self.amp.attempted_steps >= self.hparams.clip_start_step
        max_norm = (clips and self.hparams.max_grad_norm) or math.inf
        self.metrics.add_grad_norm(nn.utils.clip_grad_norm_(parameters, max_norm))

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return self.task.evaluate(self.ema, batch)

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.task.training_loader(self.optimizer)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.task.validation_loader()

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {
            "mixed_precision": self.amp,
            "ema": self.ema,
            "guard": self.guard,
            "portable_checkpoint": PortableCheckpoint(),
        }


def make_denoiser(config: experiment.Experiment[LatteHparams]) -> Denoiser:
    """The model of an experiment.

    Raises:
        ConfigError: if the frames cannot be cut into patches.
    """
    hparams, side = config.hparams, config.data.image_size
    if side % hparams.model.patch_size:
        raise ConfigError(
            config.name,
            [
                f"hyperparameters.model.patch_size: got {hparams.model.patch_size}, which does not "
                f"divide data.image_size {side}; allowed: a divisor of it"
            ],
        )
    return Denoiser(
        hparams.model, config.data, gradient_checkpointing=hparams.gradient_checkpointing
    )
