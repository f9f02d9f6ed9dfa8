"""torch's `GradScaler`, which also notes which optimizers were stepped, and the step counts.

* In the precisions without a loss scale it is disabled: every call passes through, so a trial needs
  no `if`.
* Only its own `found_inf` skips an optimizer's step, so each optimizer has its own counts. With a
  fused optimizer they are kept on the device, and the host never asks whether a step was skipped.
* The scale has a floor. Without one, about 150 skips in a row take it to exactly 0, and the next
  good step divides by it and writes NaN into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, Optimizer

from determined_amp.experiment.amp_settings import AmpSettings
from determined_amp.experiment.settings import ConfigError

_TWICE = "steps an optimizer twice; allowed: with amp.finish_steps() between two steps of a batch"


class ObservedScaler(torch.amp.GradScaler):
    """PyTorch's own `GradScaler`, disabled unless the precision is `amp_fp16`.

    Args:
        settings: The `amp` section.
        device_type: "cpu" or "cuda".

    Attributes:
        stepped: The optimizers stepped since this was last emptied, and whether the step was
            skipped: a bool where the host knows, else `found_inf`, (), float32, on the device, not
            0 for a skipped step.
        clips: Whether `step_optimizer` was given `clip_grads` for the current step.
        stepping: Whether `step` is running. An optimizer that moves at any other time may use
            gradients that are still scaled.
        moved: Set by the hook of `MixedPrecision` when an optimizer moves.
        unscaled: The optimizers that `unscale_` was called for since their last step.
        updated: Whether `update` was called since the newest step.
        has_scaled: Whether `scale` was called since the last `update`. Without it a step would
            divide gradients that were never multiplied.
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
        self.stepped: dict[torch.optim.Optimizer, bool | torch.Tensor] = {}
        self.clips = False
        self.stepping = False
        self.moved = False
        self.has_scaled = False
        self.updated = False
        self.unscaled: set[torch.optim.Optimizer] = set()
        self._used: torch.Tensor | None = None

    def scale(self, outputs: Any) -> Any:
        """`GradScaler.scale`; notes that it was called."""
        self.has_scaled = True
        return super().scale(outputs) if self._enabled else outputs

    @contextmanager
    def at(self, scale: float) -> Iterator[None]:
        """Scale by this in the block, and afterwards as before."""
        before, has_scaled = self.state_dict(), self.has_scaled
        if self._enabled:
            self.load_state_dict({**before, "scale": scale})
        try:
            yield
        finally:
            self.load_state_dict(before)
            self.has_scaled = has_scaled

    def times(self, one: torch.Tensor) -> torch.Tensor:
        """The scale itself, (), float32, on the device of `one`; 1 without a scaler."""
        scaled: torch.Tensor = super().scale(one)
        return scaled

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`GradScaler.step`; notes that this optimizer was stepped."""
        if optimizer in self.stepped:
            raise _wrong(_TWICE)
        if optimizer in self.unscaled:
            self.unscaled.discard(optimizer)
        elif self.clips:
            raise _wrong(
                "its clip_grads clips gradients that may still be scaled; allowed: "
                "clip_grads=amp.clip(optimizer, max_norm=...), or a function that calls "
                "amp.scaler.unscale_(optimizer) first"
            )
        if self._enabled and not any_gradient(optimizer):
            # torch refuses it. In float32 it leaves everything as it is, and so it does here.
            assert self._scale is not None
            self.note(optimizer, torch.zeros_like(self._scale))
        self.updated = self.moved = False
        self.stepping = True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False
        if self._enabled and getattr(optimizer, "_step_supports_amp_scaling", False):
            self.stepped[optimizer] = self._found_inf(optimizer)
        else:  # torch has asked the device
            self.stepped[optimizer] = not self.moved
        return result

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """`GradScaler.unscale_`; notes that it was called."""
        if optimizer in self.stepped:
            raise _wrong(_TWICE)
        self.unscaled.add(optimizer)
        if self._enabled:
            super().unscale_(optimizer)

    def has_unscaled(self, optimizer: Optimizer, found_inf: torch.Tensor | None) -> None:
        """Note that the gradients of an optimizer, which is to be stepped, are unscaled already.

        Args:
            optimizer: The one to be stepped.
            found_inf: See `note`; None without a loss scale.
        """
        self.unscaled.add(optimizer)
        if found_inf is not None:
            self.note(optimizer, found_inf)

    def note(self, whose: object, found_inf: torch.Tensor) -> None:
        """Take part in the next `update`.

        Args:
            whose: Stands for some gradients: their optimizer, or any other object.
            found_inf: Whether they overflowed, (), float32, on the device, not 0 if so.
        """
        state = self._per_optimizer_states[id(whose)]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.UNSCALED

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """`GradScaler.update`, with a floor under the scale. No synchronisation."""
        self.has_scaled = False
        self.updated = True
        if not self._enabled:
            return
        if self._scale is not None:
            if self._used is None:
                self._used = self._scale.clone()
            self._used.copy_(self._scale)
        if len(self._per_optimizer_states) > 1:
            # torch adds up what all optimizers found in the tensor of the first.
            self.stepped = {
                optimizer: skipped.clone() if isinstance(skipped, torch.Tensor) else skipped
                for optimizer, skipped in self.stepped.items()
            }
        super().update(new_scale)
        assert self._scale is not None
        self._scale.clamp_(min=self._min_scale)

    def scale_of_newest_step(self, one: torch.Tensor) -> torch.Tensor:
        """The scale that the newest step was made with, (), float32; the present one before it."""
        return self.times(one) if self._used is None else self._used

    def _found_inf(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        state = self._per_optimizer_states[id(optimizer)]
        first, *more = state["found_inf_per_device"].values()
        found: torch.Tensor = first
        for other in more:  # a model on several devices
            found = found + other.to(found.device, non_blocking=True)
        return found


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def any_gradient(optimizer: Optimizer) -> bool:
    """Whether a parameter of an optimizer has a gradient."""
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


class StepCounts:
    """The steps of one optimizer.

    They are counted when somebody reads them, or 64 steps together: counting a single step costs
    the host three kernels.

    Args:
        device: Where its parameters are.
        can_skip: Whether a loss scale is there to skip a step; without one all are applied.

    Attributes:
        attempted: Steps applied or skipped so far.
        applied_on_host: Applied ones, while the host knows of every step whether it was skipped;
            None after a step that only the device knows about.
    """

    _HANDFUL = 64

    def __init__(self, device: torch.device, *, can_skip: bool) -> None:
        self.attempted = 0
        self.applied_on_host: int | None = 0
        self._last_applied_on_host = 0
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        self._last_step_applied = torch.tensor(not can_skip, device=device)
        self._last_applied = torch.zeros((), dtype=torch.int64, device=device)
        self._found: list[torch.Tensor] = []  # of the newest steps, which are not counted yet
        self._settled = True

    def count(self, skipped: bool | torch.Tensor) -> None:
        """Count a step. No synchronisation.

        Args:
            skipped: What `GradScaler` found, (), not 0 for a skipped step, which nobody may change
                any more; or a bool where the host knows.
        """
        if isinstance(skipped, torch.Tensor) and self.applied_on_host is not None:
            self._settle()
            self.applied_on_host = None
        if self.applied_on_host is None and not isinstance(skipped, torch.Tensor):
            skipped = torch.full((), float(skipped), device=self._applied.device)
        self.attempted += 1
        self._settled = False
        if isinstance(skipped, torch.Tensor):
            self._found.append(skipped)
            if len(self._found) == self._HANDFUL:
                self._settle()
        elif not skipped:
            assert self.applied_on_host is not None
            self.applied_on_host += 1
            self._last_applied_on_host = self.attempted

    @property
    def applied(self) -> torch.Tensor:
        """Steps applied so far, (), int64, on the device; ask after every step."""
        self._settle()
        return self._applied

    @property
    def last_step_applied(self) -> torch.Tensor:
        """Whether the newest step was applied, (), bool, on the device; ask after every step.

        What must stand still on a skipped step, such as an average of the weights, can be gated by
        it without a synchronisation.
        """
        self._settle()
        return self._last_step_applied

    def consecutive_skips(self) -> torch.Tensor:
        """Steps skipped since the last applied one, (), int64, on the device."""
        self._settle()
        return self.attempted - self._last_applied

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
        self.applied_on_host = state["applied"]
        self._last_applied_on_host = state["last_applied"]
        self._found.clear()
        self._applied.fill_(state["applied"])
        self._last_applied.fill_(state["last_applied"])
        self._settled = True

    def _settle(self) -> None:
        """Bring the tensors up to date. No synchronisation."""
        if self._settled:
            return
        self._settled = True
        if self.applied_on_host is not None:
            self._applied.fill_(self.applied_on_host)
            self._last_applied.fill_(self._last_applied_on_host)
            self._last_step_applied.fill_(self._last_applied_on_host == self.attempted)
        elif len(self._found) == 1:
            torch.logical_not(self._found[0], out=self._last_step_applied)
            self._last_applied.masked_fill_(self._last_step_applied, self.attempted)
            self._applied.add_(self._last_step_applied)
        else:
            applied = torch.stack(self._found) == 0
            first = self.attempted - len(self._found) + 1
            steps = torch.arange(first, self.attempted + 1, device=applied.device)
            torch.maximum(self._last_applied, (steps * applied).max(), out=self._last_applied)
            self._last_step_applied.copy_(applied[-1])
            self._applied.add_(applied.sum())
        self._found.clear()


def fill_momentum(optimizer: torch.optim.Optimizer, *, can_skip: bool) -> None:
    """Give a fused SGD momentum buffers of zeros before the first step of a parameter.

    It would allocate them uninitialised and fill them in its first step. If that step is skipped,
    the second one adds the garbage to the weights. And it raises if some parameters of a group get
    their first gradient later than others.

    Args:
        optimizer: Any; others are left alone.
        can_skip: Whether there is a loss scale.

    Raises:
        ConfigError: if it has dampening, with which zeros are not the same, and can skip steps.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]):
            continue
        if group["dampening"]:
            if not can_skip:
                continue
            raise ConfigError(
                "the trial",
                [
                    f"SGD: got fused and dampening {group['dampening']:g}, which goes wrong when "
                    "the first step overflows; allowed: dampening 0, or fused=False"
                ],
            )
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def _wrong(problem: str) -> ConfigError:
    return ConfigError("the trial", [f"train_batch: {problem}"])
