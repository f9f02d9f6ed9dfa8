"""Native mixed precision for one `PyTorchTrialContext`: what a trial's `train_batch` needs.

The recipe itself (autocast, scale, backward, unscale, clip, step, update) stays visible in every
trial. This module builds its parts so that they are right, and remembers them in checkpoints:

* The scaler of `fp32`, `tf32` and `amp_bf16` is disabled: every call passes through, so that a
  trial needs no `if`. A disabled scaler is not handed to `wrap_scaler`: it would be saved as `{}`
  and a later resume in `amp_fp16` would crash on it.
* Whether a step was skipped is read from the scale on the device: `update` lowers the scale if and
  only if the step was skipped. Nothing waits for the device.
* The scale has a floor. Without one some 150 skips in a row take it to exactly 0, and the next good
  step divides by it and writes NaN into the weights.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from determined import pytorch
from torch import nn

from determined_amp.amp.accumulation import share_gradients_once
from determined_amp.amp.fp32_modules import keep_in_float32
from determined_amp.amp.precision import Precision, prepare_backend
from determined_amp.amp.schedules import AppliedStepSchedule
from determined_amp.config.settings import setting

logger = logging.getLogger(__name__)

# Settings that mean something only where the loss is scaled.
SCALER_KEYS = (
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "min_scale",
    "max_consecutive_skips",
    "max_skip_ratio",
)


class OnOverflow(enum.Enum):
    """What to do with a run that no longer trains: end it with a diagnosis, or only say so."""

    ABORT = "abort"
    WARN = "warn"


class EvalPrecision(enum.Enum):
    """What validation computes in: float32, or what training computes in."""

    FP32 = "fp32"
    SAME = "same"


@dataclass(frozen=True)
class AmpSettings:
    """The `amp` section of the hyperparameters; the scaler's names and defaults are torch's own.

    Args:
        precision: What training computes in.
        init_scale: Loss scale of the first step.
        growth_factor: The scale is multiplied by it after `growth_interval` applied steps in a row.
        backoff_factor: The scale is multiplied by it after a skipped step.
        growth_interval: Optimizer steps.
        min_scale: The scale falls no further; a step skipped at it is trouble.
        max_consecutive_skips: More optimizer steps skipped in a row are trouble.
        max_skip_ratio: A larger share of skipped steps, over ten or more, is trouble, but for the
            first ones, where the scale finds its level.
        on_overflow: What to do about trouble, a loss that is not finite included.
        eval_precision: What validation computes in.
        fp32_modules: Regular expressions; modules whose names they match compute in float32.
        audit: Stop if the first batch is not computed in `precision`; see `determined_amp.audit`.
    """

    precision: Precision = setting()
    init_scale: float = setting(65536.0, above=0)
    growth_factor: float = setting(2.0, above=1)
    backoff_factor: float = setting(0.5, above=0, below=1)
    growth_interval: int = setting(2000, at_least=1)
    min_scale: float = setting(1.0, above=0)
    max_consecutive_skips: int = setting(50, at_least=1)
    max_skip_ratio: float = setting(0.5, above=0, at_most=1)
    on_overflow: OnOverflow = setting(OnOverflow.ABORT)
    eval_precision: EvalPrecision = setting(EvalPrecision.FP32)
    fp32_modules: tuple[str, ...] = setting(())
    audit: bool = setting(True)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.init_scale < self.min_scale:
            yield (
                "init_scale",
                f"got {self.init_scale:g}, which is below min_scale {self.min_scale:g}; "
                "allowed: min_scale or more",
            )
        if self.precision is not Precision.AMP_FP16:
            for key in SCALER_KEYS:
                if key in given:
                    yield (
                        key,
                        f"given, but precision {self.precision.value} does not scale the loss; "
                        "allowed: precision amp_fp16, or the key left out",
                    )


def make_scaler(settings: AmpSettings, device_type: str) -> torch.amp.GradScaler:
    """PyTorch's own `GradScaler`, disabled unless the precision is `amp_fp16`."""
    return torch.amp.GradScaler(
        device_type,
        init_scale=settings.init_scale,
        growth_factor=settings.growth_factor,
        backoff_factor=settings.backoff_factor,
        growth_interval=settings.growth_interval,
        enabled=settings.precision is Precision.AMP_FP16,
    )


class MixedPrecision(pytorch.PyTorchCallback):
    """Autocast, scaler and step counts of one trial, and their place in its checkpoints.

    Make it before `context.wrap_model` (Determined refuses a scaler after a model) and return it
    from `build_callbacks`.

    Args:
        context: The trial's context.
        settings: The `amp` section.
        aggregation_frequency: Batches per optimizer step.
        cudnn_benchmark: Let cuDNN time its algorithms; for inputs of fixed shape.

    Attributes:
        scaler: Enabled for `amp_fp16` alone; otherwise every call on it passes through.
        applied_steps: Optimizer steps applied so far, (), int64, on the device.
        attempted_steps: Optimizer steps applied or skipped so far.
        last_step_applied: Whether the newest step was applied, (), bool, on the device; written by
            `count_step`. What must stand still on a skipped step, such as an average of the
            weights, can be gated by it without a synchronisation.
        fused: Give this to the optimizer as `fused`. On CUDA a fused optimizer takes scale and
            overflow flag as device tensors; any other makes `scaler.step` wait for the device.

    Raises:
        PrecisionError: if the device only emulates the precision.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        settings: AmpSettings,
        aggregation_frequency: int = 1,
        cudnn_benchmark: bool = False,
    ) -> None:
        self._context = context
        self.device: torch.device = context.device
        self.settings = settings
        self.aggregation_frequency = aggregation_frequency
        self.fused = self.device.type == "cuda"
        prepare_backend(settings.precision, self.device, cudnn_benchmark)
        self.scaler = make_scaler(settings, self.device.type)
        if self.scaler.is_enabled():
            context.wrap_scaler(self.scaler)
        # One object for all batches: to make one costs as much as to enter it, with torch 2.3 on a
        # machine without CUDA twenty times as much.
        self._training_autocast = self._autocast(settings.precision.autocast_dtype)
        self.attempted_steps = 0
        # Without a scaler nothing is ever skipped, and nobody writes to it again.
        self.last_step_applied = torch.tensor(not self.scaler.is_enabled(), device=self.device)
        self.applied_steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self._last_applied = torch.zeros((), dtype=torch.int64, device=self.device)
        self._one = torch.ones((), device=self.device)
        self._scale_before = self.loss_scale().clone()
        self._schedule: AppliedStepSchedule | None = None
        self._warm_start = False
        self._steps = True

    def with_islands(self, model: nn.Module) -> nn.Module:
        """The model, with the modules of `fp32_modules` kept in float32; before `wrap_model`.

        Raises:
            IslandError: if a pattern matches no module, or all of them.
        """
        keep_in_float32(model, self.settings.fp32_modules, self.device.type)
        return model

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward and loss of a training batch; never for the backward.

        It is the same object every time: do not enter it again within itself.
        """
        return self._training_autocast

    def eval_autocast(self) -> AbstractContextManager[Any]:
        """For the forward of a validation batch: float32 unless `eval_precision` is `same`."""
        same = self.settings.eval_precision is EvalPrecision.SAME
        return self._autocast(self.settings.precision.autocast_dtype if same else None)

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def is_update_batch(self, batch_idx: int) -> bool:
        """Whether this batch ends an accumulation window: step and update on these batches only."""
        return self._steps and (batch_idx + 1) % self.aggregation_frequency == 0

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Meanwhile no batch is an update batch: for training one again in search of a fault."""
        self._steps = False
        try:
            yield
        finally:
            self._steps = True

    def share_of_step(self, loss: torch.Tensor) -> torch.Tensor:
        """What one batch adds to the loss of its step, which is the mean over its window.

        Args:
            loss: Mean loss of the batch, ().

        Returns:
            `loss / aggregation_frequency`, and for 1 the loss itself: a division by 1 and its
            backward cost more time on the host than all counters together.
        """
        return loss / self.aggregation_frequency if self.aggregation_frequency > 1 else loss

    def loss_scale(self) -> torch.Tensor:
        """The current loss scale, (), float32, on the device; 1 without a scaler."""
        return self.scaler.scale(self._one)

    def follow(self, schedule: AppliedStepSchedule) -> None:
        """Move this learning-rate schedule with the applied steps."""
        self._schedule = schedule
        schedule.move_to(self.applied_steps)

    def count_step(self) -> None:
        """Note what the `scaler.update()` just before made of the step. No synchronisation."""
        self.attempted_steps += 1
        if self.scaler.is_enabled():
            scale = self.loss_scale()
            torch.ge(scale, self._scale_before, out=self.last_step_applied)
            self._last_applied.masked_fill_(self.last_step_applied, self.attempted_steps)
            self._scale_before = scale.clamp_(min=self.settings.min_scale)
            self.scaler.update(self._scale_before)
        self.applied_steps.add_(self.last_step_applied)
        if self._schedule is not None:
            self._schedule.move_to(self.applied_steps)

    def consecutive_skips(self) -> torch.Tensor:
        """Steps skipped since the last applied one, (), int64, on the device."""
        if self.scaler.is_enabled():
            return self.attempted_steps - self._last_applied
        return torch.zeros_like(self._last_applied)

    def state_dict(self) -> dict[str, Any]:
        return {
            "attempted_steps": self.attempted_steps,
            "applied_steps": int(self.applied_steps),
            "last_applied": self.attempted_steps - int(self.consecutive_skips()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by Determined after weights, optimizer and scaler have been restored."""
        if not self._warm_start:
            self.attempted_steps = state_dict["attempted_steps"]
            self.applied_steps.fill_(state_dict["applied_steps"])
            self._last_applied.fill_(state_dict["last_applied"])

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self._warm_start = first_batch_idx == 0 and checkpoint_uuid is not None

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Let this trial's settings win over those in the checkpoint.

        A resumed run keeps its current scale and growth tracker. A warm start (weights from another
        trial) begins with this trial's `init_scale`, which a search relies on. Everything that the
        YAML sets is always this trial's: the scaler's factors and interval, the optimizer's rate,
        decay and the like, which the two `load_state_dict` alone would overwrite.
        """
        optimizers = checkpoint.get("optimizers_state_dict", [])
        for saved, optimizer in zip(optimizers, self._context.optimizers, strict=False):
            groups = zip(saved["param_groups"], optimizer.param_groups, strict=False)
            for saved_group, group in groups:  # torch itself reports a mismatch
                saved_group.update({key: group[key] for key in group if key != "params"})
        state = checkpoint.pop("scaler_state_dict", None)
        if not self.scaler.is_enabled():
            if state:
                logger.info("the checkpoint has a loss scale; %s needs none", self._name())
            return
        ours = self.scaler.state_dict()
        if not state:
            logger.info("the checkpoint has no loss scale; starting with %g", ours["scale"])
        elif not self._warm_start:
            ours |= {
                "scale": state["scale"],
                "_growth_tracker": state["_growth_tracker"],
            }
        checkpoint["scaler_state_dict"] = ours

    def on_training_start(self) -> None:
        if self.aggregation_frequency > 1:
            share_gradients_once(self._context, self.is_update_batch)
        self._scale_before = self.loss_scale().clone()
        if self._schedule is not None:
            self._schedule.move_to(self.applied_steps)

    def _name(self) -> str:
        return self.settings.precision.value
