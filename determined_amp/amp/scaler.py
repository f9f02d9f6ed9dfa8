"""torch's `GradScaler`, which also tells who was stepped, and the counts of applied steps.

* A disabled scaler stands for the precisions without one: every call passes through, so that a
  trial needs no `if`.
* Each optimizer's step is skipped by its own `found_inf` alone, so each has its own counts. They
  are kept on the device: whether a step was skipped is never asked on the host.
* The scale has a floor. Without one some 150 skips in a row take it to exactly 0, and the next good
  step divides by it and writes NaN into the weights.
"""

from __future__ import annotations

from typing import Any

import torch

from determined_amp.config.amp import AmpSettings
from determined_amp.config.settings import ConfigError


class ObservedScaler(torch.amp.GradScaler):
    """PyTorch's own `GradScaler`, disabled unless the precision is `amp_fp16`.

    Args:
        settings: The `amp` section.
        device_type: "cpu" or "cuda".

    Attributes:
        stepped: The optimizers stepped since this was last emptied, each with its `found_inf`:
            (), float32, on the device, not 0 if the step was skipped; None without a scale.
        stepping: Whether a step is under way; an optimizer that moves at any other time moves by
            gradients that may still be scaled.
        unscaled: The optimizers that `unscale_` was called for since their last step.
        updated: Whether `update` was called since the newest step.
        has_scaled: Whether `scale` was called since the last `update`; without that a step would
            divide gradients that nobody has multiplied.
    """

    def __init__(self, settings: AmpSettings, device_type: str) -> None:
        super().__init__(
            device_type,
            init_scale=settings.init_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            enabled=settings.scales_the_loss,
        )
        self._min_scale = settings.min_scale
        self.stepped: dict[torch.optim.Optimizer, torch.Tensor | None] = {}
        self.stepping = False
        self.has_scaled = False
        self.updated = False
        self.unscaled: set[torch.optim.Optimizer] = set()
        self._used: torch.Tensor | None = None

    def scale(self, outputs: Any) -> Any:
        """`GradScaler.scale`; notes that it was called."""
        self.has_scaled = True
        return super().scale(outputs)

    def times(self, one: torch.Tensor) -> torch.Tensor:
        """The scale itself, (), float32, on the device of `one`; 1 without a scaler."""
        scaled: torch.Tensor = super().scale(one)
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`GradScaler.step`; notes that this optimizer was stepped."""
        self._refuse_second_step(optimizer)
        self.updated = False
        self.stepping = True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False
        self.unscaled.discard(optimizer)
        self.stepped[optimizer] = self._found_inf(optimizer) if self._enabled else None
        return result

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """`GradScaler.unscale_`; notes that it was called."""
        self._refuse_second_step(optimizer)
        self.unscaled.add(optimizer)
        super().unscale_(optimizer)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """`GradScaler.update`, with a floor under the scale. No synchronisation."""
        if self._enabled and self._scale is not None:
            if self._used is None:
                self._used = self._scale.clone()
            self._used.copy_(self._scale)
        super().update(new_scale)
        self.has_scaled = False
        self.updated = True
        if self._enabled:
            assert self._scale is not None
            self._scale.clamp_(min=self._min_scale)

    def _refuse_second_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self.stepped:
            raise ConfigError(
                "the trial",
                ["train_batch: steps an optimizer twice; allowed: once for each amp.update(...)"],
            )

    def scale_of_newest_step(self, one: torch.Tensor) -> torch.Tensor:
        """The scale that the newest step was made with, (), float32; the present one before it."""
        return self.times(one) if self._used is None else self._used

    def _found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        first, *more = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        found: torch.Tensor = first
        for other in more:  # a model on several devices
            found = found + other.to(found.device, non_blocking=True)
        return found


class StepCounts:
    """The steps of one optimizer.

    Args:
        device: Where its parameters are.
        can_skip: Whether a loss scale is there to skip a step; without one all are applied.

    Attributes:
        attempted: Steps applied or skipped so far.
        applied: Steps applied so far, (), int64, on the device.
        last_step_applied: Whether the newest step was applied, (), bool, on the device. What must
            stand still on a skipped step, such as an average of the weights, can be gated by it
            without a synchronisation.
    """

    def __init__(self, device: torch.device, *, can_skip: bool) -> None:
        self.attempted = 0
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        self.last_step_applied = torch.tensor(not can_skip, device=device)
        self._last_applied = torch.zeros((), dtype=torch.int64, device=device)
        self._can_skip = can_skip

    def count(self, found_inf: torch.Tensor | None) -> None:
        """Count a step. No synchronisation.

        Args:
            found_inf: What `GradScaler` found, (), on the device; None without a scale.
        """
        self.attempted += 1
        if found_inf is not None:
            torch.eq(found_inf, 0, out=self.last_step_applied)
            self._last_applied.masked_fill_(self.last_step_applied, self.attempted)
        self.applied.add_(self.last_step_applied)

    def consecutive_skips(self) -> torch.Tensor:
        """Steps skipped since the last applied one, (), int64, on the device."""
        if self._can_skip:
            return self.attempted - self._last_applied
        return torch.zeros_like(self._last_applied)

    def state_dict(self) -> dict[str, int]:
        """Plain numbers; synchronises."""
        return {
            "attempted": self.attempted,
            "applied": int(self.applied),
            "last_applied": self.attempted - int(self.consecutive_skips()),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """What `state_dict` gave."""
        self.attempted = state["attempted"]
        self.applied.fill_(state["applied"])
        self._last_applied.fill_(state["last_applied"])
