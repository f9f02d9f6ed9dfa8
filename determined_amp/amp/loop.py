"""Mixed precision for any PyTorch training loop.

    amp = AmpLoop(AmpSettings(Precision.AMP_FP16), device)
    model = amp.prepare(net()).to(device)
    optimizer = AdamW(model.parameters(), lr=1e-3, fused=amp.fused)
    amp.wrap_lr_scheduler(OneCycleLR(optimizer, ...))
    for step, batch in enumerate(loader):
        with amp.autocast():
            loss = loss_fn(batch)
        amp.scaler.scale(loss).backward()
        amp.clip_gradients(optimizer, max_norm=1.0)  # unscale_, clip, norm
        amp.scaler.step(optimizer)
        optimizer.zero_grad()
        amp.update(loss, samples=len(batch))  # scaler.update(), counts, schedule
        if step % 100 == 99:
            report(amp.report(batch, loss_fn))  # synchronises; the guard judges

The recipe is PyTorch's own and stays visible. `AmpLoop` builds its parts correctly,
counts and reports what they do, and resumes them to the bit. With a fused optimizer
nothing in a step waits for the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from determined_amp.amp.core import AmpCore
from determined_amp.amp.mistakes import IN_A_LOOP
from determined_amp.amp.plain_data import Metrics, StateDict
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import AmpSettings
from determined_amp.amp.slots import ProcessGroup, Slots
from determined_amp.amp.tensors import own_copy

logger = logging.getLogger(__name__)


class AmpLoop(AmpCore):
    """The parts of one training loop; see `AmpCore` for its attributes.

    Args:
        settings: The `amp` section of a YAML.
        device: Where the training computes.
        slots: The processes of the training, such as `core_context.distributed` of
            Determined. By default the processes of torch's default group, or only this
            process if there is no group.

    Raises:
        ConfigError: if `init_scale` is `find`.
        PrecisionError: if the device only emulates the precision.
    """

    words = IN_A_LOOP

    _has_reported = False  # and trained no batch since

    def __init__(
        self,
        settings: AmpSettings,
        device: torch.device | str,
        *,
        slots: Slots | None = None,
    ) -> None:
        self._require_settings(settings)
        if settings.finds_scale:
            raise self._wrong(
                "init_scale",
                "got find, for which a loop has no batches yet; allowed: a number, "
                "such as determined_amp.find_loss_scale(model, loss_fn, "
                "batches).init_scale",
            )
        slots = slots or ProcessGroup(torch.device(device))
        super().__init__(settings, device, slots=slots, models=[], optimizers=[])
        self._see_steps()

    # Before the training.

    def prepare(self, model: nn.Module) -> nn.Module:
        self.models.append(super().prepare(model))
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give an optimizer the next number, and return the optimizer.

        With several optimizers, call it for each of them before `load_state_dict`: a
        saved state finds its optimizer by this number. A single optimizer needs no
        call.

        Raises:
            ConfigError: if the optimizer trains weights in 16 bits.
        """
        self.windows[optimizer]  # the first look makes it
        return optimizer

    def start(self) -> None:
        """Check the settings against the models, and record the state at the start.

        The first `autocast` calls it. Synchronises.

        Raises:
            ConfigError: if a setting needs a model, and none was prepared.
            IslandError: if a pattern of `fp32_modules` matches no module.
        """
        if not self.models:
            logger.warning(
                "no model was given to amp.prepare: after an overflow nothing puts "
                "back the running statistics of its layers, such as BatchNorm, and no "
                "cause names its modules"
            )
        self._begin()
        self.metrics.reset()
        self.guard.start()

    # The step.

    def autocast(self) -> AbstractContextManager[Any]:
        if not self._started:
            self.start()
        if self._has_reported:
            self._has_reported = False
            self.metrics.restart()
        return super().autocast()

    def clip_gradients(self, optimizer: Optimizer, max_norm: float = math.inf) -> None:
        """Unscale the gradients of an optimizer, measure their norm, and clip them.

        Call it after accumulation, before `scaler.step`.

        Args:
            optimizer: The optimizer that steps next.
            max_norm: Largest 2-norm of its gradients; infinity only measures the norm.

        Raises:
            ConfigError: if `max_norm` is not above 0.
        """
        self._check_norm(max_norm, "clip_gradients")
        self._clip(optimizer, max_norm)

    def update(
        self, loss: torch.Tensor | float | None = None, samples: int | None = None
    ) -> dict[str, float]:
        """End a batch: call `scaler.update()` if an optimizer stepped, and count.

        Call it once per batch, even if gradients accumulate over several batches.

        Args:
            loss: Mean loss of the batch, unscaled, one number; reported as `loss`.
            samples: Samples in the batch; if None, no speed is reported.

        Returns:
            What a trial's `train_batch` must return; a loop can ignore it.

        Raises:
            ConfigError: if the loss is not one number.
        """
        if self.is_rehearsing:
            return {}
        self.scaler.finish()
        return self._count(loss, samples)

    # Once per report.

    def report(
        self, batch: Any = None, loss_fn: Callable[[Any], torch.Tensor] | None = None
    ) -> Metrics:
        """The metrics since the last report; see `MetricName`. Synchronises.

        It is a collective call: all slots must make it.

        Args:
            batch: The newest batch. If the guard ends the run, it rehearses this batch
                to find the cause, operation by operation. All state is restored.
            loss_fn: Runs the forward of a batch and returns the loss, as for
                `find_loss_scale`.

        Raises:
            GuardError: if the run no longer trains. Save a checkpoint if the error's
                `state_is_good` is true.
        """
        everywhere = self.slots.allgather(self.metrics.per_slot_reduce())
        metrics = self.metrics.cross_slot_reduce(everywhere)
        self.metrics.reset()
        self._has_reported = True
        newest = None if loss_fn is None else self.rehearsal(batch, loss_fn)
        self.guard.judge(metrics, newest)
        return metrics

    def validated(self, metric: float) -> None:
        """Step every `ReduceLROnPlateau` with the metric of a validation."""
        for schedule in self.windows.schedules():
            schedule.validated(metric)

    # What belongs in a checkpoint besides models and optimizers.

    def state_dict(self) -> StateDict:
        """Loss scale, counts and schedules, in plain numbers; synchronises."""
        # the weights already contain steps that `update` has not counted
        if self.scaler.has_uncounted_steps():
            self.finish_steps()
        self.guard.warn_of_no_applied_step()
        self.guard.repair()
        return {"scaler": self.scaler.state_dict(), **self.windows.state_dict()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a `state_dict`, after models and optimizers are restored.

        Raises:
            ConfigError: if it counts more optimizers than are known here, or is not the
                state of a loop.
        """
        if "optimizers" not in state_dict:
            problem = "got no state of a loop; allowed: what amp.state_dict() returned"
            raise self._wrong(
                "load_state_dict", f"{problem}; a GradScaler's is for amp.scaler"
            )
        if state_dict.get("scaler"):
            self.scaler.load_state_dict(state_dict["scaler"])
        saved = len(state_dict["optimizers"])
        if saved > max(1, len(self.optimizers)):
            raise self._wrong(
                "load_state_dict",
                f"the state has the steps of {saved} optimizers, and "
                f"{len(self.optimizers)} are known here; call "
                "amp.wrap_optimizer(optimizer) for each of them before, in the same "
                "order as in the training that was saved",
            )
        self.windows.load_state_dict(state_dict)

    # Rehearsals of a batch.

    def rehearsal(
        self, batch: Any, loss_fn: Callable[[Any], torch.Tensor]
    ) -> Rehearsal:
        """Make the rehearsal of a batch.

        Args:
            batch: The batch. Each run trains a copy of it.
            loss_fn: Runs the forward of a batch and returns the loss.
        """

        def train() -> None:
            with AmpCore.autocast(self):
                loss = loss_fn(own_copy(batch))
            is_loss = isinstance(loss, torch.Tensor) and loss.numel() == 1
            if not (is_loss and loss.requires_grad):
                problem = (
                    f"returned {_described(loss)}; allowed: the loss, a tensor of one "
                    "element that depends on the model's parameters"
                )
                raise self._wrong("loss_fn", problem)
            torch.autograd.backward(self.scaler.scale(loss))

        return self.rehearsal_by(train, batch)

    def _meet(self, optimizer: Optimizer) -> None:
        super()._meet(optimizer)
        self.optimizers.append(optimizer)
        self._see_steps_of(optimizer)


def _described(loss: object) -> str:
    if isinstance(loss, torch.Tensor):
        detached = "" if loss.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(loss.shape)}{detached}"
    return f"a {type(loss).__name__}"
