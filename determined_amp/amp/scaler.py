"""torch's `GradScaler`, with a floor under the scale and a stage for every optimizer.

* In the precisions without a loss scale it is disabled: every call passes through, so a
  training needs no `if`.
* Only its own `found_inf` skips an optimizer's step, so each optimizer has its own
  outcome. With a fused optimizer that stays on the device, and the host never asks
  whether a step was skipped.
* The scale has a floor. Without one, about 150 skips in a row take it to exactly 0, and
  the next good step divides by it and writes NaN into the weights.
* Every optimizer has a `Window`, which goes through the same stages in every precision,
  so that fp32 shows a mistake, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from determined_amp.amp.clips import Clip, listen_to_clips
from determined_amp.amp.mistakes import (
    AWAITS_UPDATE,
    HAS_STEPPED,
    MAY_BE_SCALED,
    Mistake,
    Stage,
    error_of,
)
from determined_amp.amp.patched import do_nothing
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.settings import AmpSettings
from determined_amp.amp.tensors import closure_of, parameters_of
from determined_amp.amp.torch_private import (
    GROWTH_TRACKER,
    scale_in,
    states_of_steps,
)
from determined_amp.amp.window import RUNNING, Window, Windows


class LossScaler(torch.amp.GradScaler):
    """PyTorch's own `GradScaler`, enabled only for `amp_fp16`.

    Args:
        settings: The `amp` section.
        device_type: "cpu" or "cuda".
        windows: The window of each optimizer.
        parameters: Returns those of the training.

    Attributes:
        windows: See above.
        has_scaled: Whether `scale` was called since the last `update`. Without it a
            step would divide gradients that were never multiplied.
        has_stepped: Whether a step was counted since somebody has set it to False.
        parameters: See above; a rehearsal, which leaves gradients scaled, replaces it.
        stop_listening: Lets every clip pass from now on: the training is over, or
            somebody unscales gradients right after each backward.
    """

    def __init__(
        self,
        settings: AmpSettings,
        device_type: str,
        windows: Windows,
        *,
        parameters: Callable[[], Sequence[torch.Tensor] | None] = tuple,
    ) -> None:
        super().__init__(
            device_type,
            init_scale=settings.first_scale,
            growth_factor=settings.growth_factor,
            backoff_factor=settings.backoff_factor,
            growth_interval=settings.growth_interval,
            enabled=settings.scales_the_loss,
        )
        self._scales = self.is_enabled()
        self.windows = windows
        self.has_scaled = False
        self.has_stepped = False
        self.parameters = parameters
        self._min_scale = settings.min_scale
        self._used: torch.Tensor | None = None
        self._one = torch.ones((), device=windows.device)
        self.stop_listening: Callable[[], None] = do_nothing
        if self._scales:
            by_us = Window.__module__
            self.stop_listening = listen_to_clips(self._refuse_clip, but_by=by_us)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise error_of(Mistake.COPIES, self.windows.remedies)

    # The calls of torch's recipe.

    def scale(self, outputs: Any) -> Any:
        """Call `GradScaler.scale`, and note that it was called."""
        self.has_scaled = True
        for window in self.windows.values():
            # `zero_grad` was called in place of the step: unscale anew.
            if window.stage is Stage.UNSCALED and not window.has_gradient():
                if self._scales:
                    self._keep_what_was_found(window.optimizer)
                window.leave_out()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Call `GradScaler.unscale_`, before anything reads or clips the gradients."""
        self.windows[optimizer].move("unscale")
        if self._scales:
            super().unscale_(optimizer)
            if not states_of_steps(self)[id(optimizer)]["found_inf_per_device"]:
                self._note_nothing(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `GradScaler.step`, and keep whether it skipped the step.

        Raises:
            ConfigError: if the step is a mistake.
        """
        window = self.windows[optimizer]
        window.begin_step()
        closure = closure_of(args, kwargs) if args or kwargs else None
        if closure is not None:
            args, kwargs = self._with_new_casts(closure, args, kwargs)
        elif window.has_gradient():
            if not self.has_scaled:
                raise error_of(Mistake.SCALES_NO_LOSS, self.windows.remedies)
        elif self._scales:
            # torch raises an error here. In float32 such a step changes nothing, nor
            # does it here.
            self._note_nothing(optimizer)
        outer, RUNNING.window = RUNNING.window, window
        RUNNING.in_threads.append(window)
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            RUNNING.window = outer
            RUNNING.in_threads.remove(window)
        window.move("step")
        torch.clear_autocast_cache()  # of the old weights, see `casts.py`
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Call `GradScaler.update`, and keep the scale above its floor. No
        synchronisation.
        """
        self.has_scaled = False
        for window in self.windows.values():
            window.move("update")
        if not self._scales:
            return
        scale = scale_in(self)
        if scale is not None:
            self._used = scale.clone()
        super().update(new_scale)
        scale_in(self).clamp_(min=self._min_scale)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with a saved scale; factors and interval stay those of the
        settings.
        """
        if self._scales:
            kept = {key: state_dict[key] for key in ("scale", GROWTH_TRACKER)}
            super().load_state_dict({**self.state_dict(), **kept})

    # The calls of the loop around it.

    def has_uncounted_steps(self) -> bool:
        """Whether an optimizer has stepped since `finish`."""
        return any(each.stage in HAS_STEPPED for each in self.windows.values())

    def finish(self) -> None:
        """Update the scale, unless that was done, and count the steps.

        An overflow counts for the scale even if its step was left out, say because of
        the norm.
        """
        windows = self.windows.values()
        awaiting = {each.stage for each in windows if each.stage in AWAITS_UPDATE}
        if awaiting and not (awaiting == {Stage.LEFT_OUT} and self._has_scaled()):
            self.update()
        for window in windows:
            if window.stage is Stage.UPDATED:
                window.count()
                self.has_stepped = True

    def loss_scale(self) -> torch.Tensor:
        """The scale itself, (), float32, on the device; 1 without a scaler."""
        scaled: torch.Tensor = super().scale(self._one)
        return scaled

    def loss_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The present scale, and that of the newest step, if there is one; see
        `loss_scale`.
        """
        now = self.loss_scale()
        return now, now if self._used is None else self._used

    # Calls on behalf of a training whose code knows nothing of a scaler.

    def take_true_gradients(self, window: Window) -> None:
        """Let a window have a step of gradients that are unscaled already, whatever
        was called before.
        """
        if window.stage in HAS_STEPPED:  # a second step in a batch
            self.finish()
        self.has_scaled = True
        if self._scales and window.found_inf is not None:
            self.note(window.optimizer, window.found_inf)
        elif self._scales:
            self._note_nothing(window.optimizer)
        window.move("unscale")

    def note(self, whose: object, found_inf: torch.Tensor) -> None:
        """Take part in the next `update`, and take gradients as unscaled.

        Args:
            whose: The optimizer of some gradients, or any object that stands for them.
            found_inf: Whether they overflowed, (), float32, on the device; not 0 if
                they did.
        """
        state = states_of_steps(self)[id(whose)]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.UNSCALED

    # Internals.

    def _with_new_casts(
        self, closure: Callable[[], Any], args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The arguments of a step whose closure casts the weights anew.

        Raises:
            ConfigError: if there is a loss scale.
        """
        if self._scales:
            raise error_of(Mistake.TAKES_CLOSURE, self.windows.remedies)
        anew = partial(_call_with_new_casts, closure)
        return (
            ((anew, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": anew})
        )

    def _has_scaled(self) -> bool:
        """Whether gradients accumulate that another scale must not divide."""
        windows = self.windows.values()
        return any(
            each.stage in MAY_BE_SCALED and each.has_gradient() for each in windows
        )

    def _refuse_clip(self, clip: Clip) -> None:
        """Raise if torch is about to clip a gradient that is still scaled."""
        if not self.has_scaled:
            return
        scaled = {parameter.grad for parameter in self.parameters() or ()}
        for optimizer, window in self.windows.items():
            if window.stage not in MAY_BE_SCALED:
                scaled -= {parameter.grad for parameter in parameters_of(optimizer)}
        if not scaled.isdisjoint(clip.gradients):
            raise error_of(Mistake.CLIPS_SCALED, self.windows.remedies)

    def _keep_what_was_found(self, optimizer: object) -> None:
        """Let the next `update` know of gradients that are gone, and torch unscale the
        next ones.
        """
        states = states_of_steps(self)
        state = states.pop(id(optimizer))
        states[id(state)] = state

    def _note_nothing(self, optimizer: object) -> None:
        self.note(optimizer, torch.zeros_like(scale_in(self)))


def _call_with_new_casts(closure: Callable[[], Any]) -> Any:
    """Call the closure of an optimizer, which may have moved the weights since the last
    call.
    """
    torch.clear_autocast_cache()
    return closure()
