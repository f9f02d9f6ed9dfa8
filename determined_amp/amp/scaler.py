"""torch's `GradScaler`, with a floor under the scale and a stage for every optimizer.

* In the precisions without a loss scale it is disabled: every call passes through, so a
  training needs no `if`.
* Only its own `found_inf` skips an optimizer's step, so each optimizer has its own
  outcome. With a fused optimizer that stays on the device, and the host never asks
  whether a step was skipped.
* The scale has a floor. Without one, about 150 skips in a row take it to exactly 0, and
  the next good step divides by it and writes NaN into the weights.
* Every optimizer goes through `SCALED`, `UNSCALED` and `STEPPED`, in every precision,
  so that fp32 shows a mistake, too; see `mistakes.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from determined_amp.amp.casts import drop_casts
from determined_amp.amp.clips import Clip, listen_to_clips
from determined_amp.amp.mistakes import IN_A_LOOP, TRANSITIONS, Mistake, Stage, error_of
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.settings import AmpSettings
from determined_amp.amp.tensors import (
    any_gradient,
    closure_of,
    parameters_of,
)
from determined_amp.amp.torch_private import (
    GROWTH_TRACKER,
    scale_tensor,
    states_of_steps,
    takes_found_inf,
)

# Whether a step was skipped: a bool where the host knows, else `found_inf`, (),
# float32, on the device, not 0 for a skipped step.
Skipped = bool | torch.Tensor

# It clips what it has just unscaled.
_OUR_CLIP = "determined_amp.amp.steps"

# All scalers of the process. A step that one of them makes is no mistake in another
# training of the same model.
_SCALERS: weakref.WeakSet[LossScaler] = weakref.WeakSet()


class LossScaler(torch.amp.GradScaler):
    """PyTorch's own `GradScaler`, enabled only for `amp_fp16`.

    Args:
        settings: The `amp` section.
        device_type: "cpu" or "cuda".
        meet: Called with each optimizer before its first step.
        remedies: What error messages suggest for each mistake.
        trained: Returns the parameters of the training that no clip may touch now.

    Attributes:
        clips: Whether the current step clips with a function of the trial's own.
        has_scaled: Whether `scale` was called since the last `update`. Without it a
            step would divide gradients that were never multiplied.
        leaves_true_gradients: Set it if somebody unscales gradients right after each
            backward.
        stepping: Whether a step is running. An optimizer that moves at any other time
            may use gradients that are still scaled.
    """

    def __init__(
        self,
        settings: AmpSettings,
        device_type: str,
        meet: Callable[[Optimizer], object] = lambda optimizer: None,
        remedies: Mapping[Mistake, str] = IN_A_LOOP,
        *,
        trained: Callable[[], Sequence[torch.Tensor] | None] = tuple,
    ) -> None:
        super().__init__(
            device_type,
            init_scale=settings.first_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            enabled=settings.scales_the_loss,
        )
        self.clips = False
        self.has_scaled = False
        self.leaves_true_gradients = False
        self.stepping = False
        self._trained = trained
        self._scales = self.is_enabled()
        self._min_scale = settings.min_scale
        self._meet = meet
        self._remedies = remedies
        self._stages: dict[Optimizer, Stage] = {}
        self._outcomes: dict[Optimizer, Skipped] = {}
        self._has_moved = False
        self._needs_update = False
        self._refuses_clips = False
        self._used: torch.Tensor | None = None
        _SCALERS.add(self)

    # The calls of torch's recipe.

    def scale(self, outputs: Any) -> Any:
        """Call `GradScaler.scale`, and note that it was called."""
        self.has_scaled = True
        if self._stages:
            self._forget_dropped_gradients()
        if self._scales and not (self._refuses_clips or self.leaves_true_gradients):
            self._refuses_clips = True
            listen_to_clips(self._refuse_clip, first=True)
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Call `GradScaler.unscale_`, before anything reads or clips the gradients."""
        stage = self._check(optimizer, "unscale")
        self._stages[optimizer] = stage
        if self._scales:
            super().unscale_(optimizer)
            if not any_gradient(optimizer):
                self._note_nothing(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `GradScaler.step`, and keep whether it skipped the step."""
        if self.clips:
            self._check(optimizer, "clip")
        self._check(optimizer, "step")
        closure = closure_of(args, kwargs)
        if closure is not None:
            if self._scales:
                raise error_of(Mistake.TAKES_CLOSURE, self._remedies)
            args, kwargs = (partial(_call_with_new_casts, closure),), {}
        elif not self.has_scaled and any_gradient(optimizer):
            raise error_of(Mistake.SCALES_NO_LOSS, self._remedies)
        self._meet(optimizer)
        if self._scales and not any_gradient(optimizer):
            # torch raises an error here. In float32 such a step changes nothing, nor
            # does it here.
            self._note_nothing(optimizer)
        self._has_moved = False
        self.stepping = True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            self.stepping = False
        if self._scales and takes_found_inf(optimizer):
            self.has_stepped(optimizer, self._found_inf(optimizer))
        else:  # torch has asked the device
            self.has_stepped(optimizer, not self._has_moved)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Call `GradScaler.update`, and keep the scale above its floor. No
        synchronisation.
        """
        self.has_scaled = self._needs_update = False
        self._stages = {
            each: s for each, s in self._stages.items() if s is Stage.STEPPED
        }
        if not self._scales:
            return
        scale = scale_tensor(self)
        if scale is not None:
            self._used = scale.clone()
        if len(states_of_steps(self)) > 1:
            # torch adds up what all optimizers found in the tensor of the first.
            self._outcomes = {
                optimizer: skipped.clone()
                if isinstance(skipped, torch.Tensor)
                else skipped
                for optimizer, skipped in self._outcomes.items()
            }
        super().update(new_scale)
        scale_tensor(self).clamp_(min=self._min_scale)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with a saved scale; factors and interval stay those of the
        settings.
        """
        if self._scales:
            kept = {key: state_dict[key] for key in ("scale", GROWTH_TRACKER)}
            super().load_state_dict({**self.state_dict(), **kept})

    # The calls of the loop around it.

    @property
    def outcomes(self) -> Mapping[Optimizer, Skipped]:
        """The optimizers that have stepped since `finish`, and whether the step was
        skipped.
        """
        return self._outcomes

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Whether the gradients of an optimizer are unscaled, and it has not stepped
        yet.
        """
        return self._stages.get(optimizer) is Stage.UNSCALED

    def unscale_once(self, optimizer: Optimizer) -> None:
        """Call `unscale_`, unless the gradients of an optimizer are unscaled
        already.
        """
        if self._stages.get(optimizer) is not Stage.UNSCALED:
            self.unscale_(optimizer)

    def sees_step(self) -> bool:
        """Note that an optimizer steps; whether this or another scaler makes the
        step.
        """
        self._has_moved = True
        return self.stepping or any(scaler.stepping for scaler in _SCALERS)

    def check_end(self) -> None:
        """Every batch ends with this call.

        Raises:
            ConfigError: if an optimizer has stepped without a following update.
        """
        for optimizer in self._outcomes:
            self._check(optimizer, "end")

    def finish(self) -> dict[Optimizer, Skipped]:
        """Update the scale, unless that was done; return the outcome of each step.

        An overflow counts for the scale even if its step was left out, say because of
        the norm.
        """
        if self._needs_update or Stage.UNSCALED in self._stages.values():
            self.update()
        outcomes, self._outcomes = self._outcomes, {}
        self._stages.clear()
        return outcomes

    def times(self, one: torch.Tensor) -> torch.Tensor:
        """The scale itself, (), float32, on the device of `one`; 1 without a scaler."""
        scaled: torch.Tensor = super().scale(one)
        return scaled

    def scales(self, one: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The present scale, and that of the newest step; see `times`."""
        return self.times(one), self.scale_of_newest_step(one)

    def scale_of_newest_step(self, one: torch.Tensor) -> torch.Tensor:
        """The scale that the newest step was made with, (), float32; the present one
        before it.
        """
        return self.times(one) if self._used is None else self._used

    # Calls on behalf of a training whose code knows nothing of a scaler.

    def has_unscaled(
        self, optimizer: Optimizer, found_inf: torch.Tensor | None
    ) -> None:
        """Note that an optimizer is about to step with gradients that are already
        unscaled.

        Args:
            optimizer: The optimizer.
            found_inf: See `note`; None without a loss scale.
        """
        self._stages[optimizer] = Stage.UNSCALED
        if found_inf is not None:
            self.note(optimizer, found_inf)

    def has_stepped(self, optimizer: Optimizer, skipped: Skipped) -> None:
        """Note that an optimizer has stepped, through `step` or by itself."""
        self._stages[optimizer] = Stage.STEPPED
        self._outcomes[optimizer] = skipped
        self._needs_update = True
        drop_casts()

    def note(self, whose: object, found_inf: torch.Tensor) -> None:
        """Take part in the next `update`.

        Args:
            whose: The optimizer of some gradients, or any object that stands for them.
            found_inf: Whether they overflowed, (), float32, on the device; not 0 if
                they did.
        """
        state = states_of_steps(self)[id(whose)]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.UNSCALED

    # Internals.

    def _check(self, optimizer: Optimizer, call: str) -> Stage:
        """The stage after a call."""
        after = TRANSITIONS[self._stages.get(optimizer, Stage.SCALED), call]
        if isinstance(after, Mistake):
            raise error_of(after, self._remedies)
        return after

    def _refuse_clip(self, clip: Clip) -> None:
        """Raise if torch is about to clip a gradient that is still scaled."""
        if not self.has_scaled or clip.by == _OUR_CLIP:
            return
        scaled = {parameter.grad for parameter in self._trained() or ()}
        for optimizer, stage in self._stages.items():
            if stage is not Stage.SCALED:
                scaled -= {parameter.grad for parameter in parameters_of(optimizer)}
        if not scaled.isdisjoint(clip.gradients):
            raise error_of(Mistake.CLIPS_SCALED, self._remedies)

    def _note_nothing(self, optimizer: Optimizer) -> None:
        self.note(optimizer, torch.zeros_like(scale_tensor(self)))

    def _forget_dropped_gradients(self) -> None:
        """An error may have led to `zero_grad` between a clip and its step: unscale
        anew.
        """
        unscaled = [
            each for each, stage in self._stages.items() if stage is Stage.UNSCALED
        ]
        for optimizer in unscaled:
            if not any_gradient(optimizer):
                del self._stages[optimizer]
                states_of_steps(self).pop(id(optimizer), None)

    def _found_inf(self, optimizer: Optimizer) -> torch.Tensor:
        state = states_of_steps(self)[id(optimizer)]
        first, *more = state["found_inf_per_device"].values()
        found_inf: torch.Tensor = first
        for other in more:  # a model on several devices
            found_inf = found_inf + other.to(found_inf.device, non_blocking=True)
        return found_inf


def _call_with_new_casts(closure: Callable[[], Any]) -> Any:
    """Call the closure of an optimizer, which may have moved the weights since the last
    call.
    """
    drop_casts()
    return closure()
