"""torch's `GradScaler`, with a floor under the scale and a `Window` per optimizer.

* In precisions without a loss scale it is disabled. Every call then passes through, so
  a training needs no `if`.
* An optimizer's step is skipped only by that optimizer's own `found_inf`. With a fused
  optimizer `found_inf` stays on the device, and the host never asks whether a step was
  skipped.
* The scale has a floor. Without one, about 150 skips in a row take it to exactly 0. The
  next good step then divides by 0 and writes NaN into the weights.
* Every optimizer has a `Window`, which goes through the same stages in every precision.
  So a mistake also shows in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from determined_amp.amp.clips import Clip, listen_to_clips
from determined_amp.amp.counts import LeftOutBatches
from determined_amp.amp.mistakes import (
    AWAITS_UPDATE,
    HAS_STEPPED,
    MAY_BE_SCALED,
    Mistake,
    Stage,
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
from determined_amp.amp.window import RUNNING, Window, Windows, gradients_of


class LossScaler(torch.amp.GradScaler):
    """PyTorch's own `GradScaler`, enabled only for `amp_fp16`.

    Args:
        settings: The `amp` section.
        device_type: "cpu" or "cuda".
        windows: The window of each optimizer.
        parameters: Returns the parameters of the training.

    Attributes:
        windows: See above.
        has_scaled: Whether `scale` was called since the last `update`. If not, a step
            would divide gradients that were never multiplied.
        left_out: The batches that the training leaves out.
        parameters: See above.
        is_rehearsing: Whether a batch is rehearsed. Then gradients stay scaled, and
            nothing is recorded or refused.
        stop_listening: Call it to let every clip pass from now on: when the training is
            over, or if gradients are unscaled right after each backward.
    """

    def __init__(
        self,
        settings: AmpSettings,
        device_type: str,
        windows: Windows,
        *,
        parameters: Callable[[], Sequence[torch.Tensor]] = tuple,
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
        self.left_out = LeftOutBatches(windows.device)
        self.parameters = parameters
        self.is_rehearsing = False
        self._min_scale = settings.min_scale
        self._scale_before_update: torch.Tensor | None = None
        self._one = torch.ones((), device=windows.device)
        self.stop_listening: Callable[[], None] = do_nothing
        if self._scales:
            by_us = Window.__module__
            self.stop_listening = listen_to_clips(
                self._refuse_clip, ignored_module=by_us
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise self.windows.words.error_of(Mistake.COPIES)

    # The calls of torch's recipe.

    def scale(self, outputs: Any) -> Any:
        """Call `GradScaler.scale`, and record that it was called."""
        if self.is_rehearsing:
            return super().scale(outputs)
        self.has_scaled = True
        self.left_out.begin_backward(self._gradients)
        for window in self.windows.values():
            # `zero_grad` was called instead of a step: torch must unscale again.
            if window.stage is Stage.UNSCALED and not window.has_gradient():
                if self._scales:
                    self._keep_what_was_found(window.optimizer)
                window.drop()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Call `GradScaler.unscale_`. It must precede any read or clip of gradients."""
        self.windows[optimizer].move("unscale")
        if self._scales:
            if scale_in(self) is None:
                raise self.windows.words.error_of(Mistake.SCALES_NO_LOSS)
            super().unscale_(optimizer)
            if not states_of_steps(self)[id(optimizer)]["found_inf_per_device"]:
                self._note_nothing(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call `GradScaler.step`, and record whether it skipped the step.

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
                raise self.windows.words.error_of(Mistake.SCALES_NO_LOSS)
        elif self._scales:
            # A step without gradients changes nothing in float32. Here torch would
            # raise an error, so we record that there is no overflow.
            if scale_in(self) is None:
                raise self.windows.words.error_of(Mistake.SCALES_NO_LOSS)
            self._note_nothing(optimizer)
        outer, RUNNING.window = RUNNING.window, window
        RUNNING.in_threads.append(window)
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            RUNNING.window = outer
            RUNNING.in_threads.remove(window)
        window.move("step")
        torch.clear_autocast_cache()  # it has the old weights, see `casts.py`
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Call `GradScaler.update`, and apply the floor. No synchronisation."""
        self.has_scaled = False
        for window in self.windows.values():
            window.move("update")
        if not self._scales:
            return
        scale = scale_in(self)
        if scale is not None:
            self._scale_before_update = scale.clone()
        super().update(new_scale)
        scale_in(self).clamp_(min=self._min_scale)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with a saved scale and growth tracker, but with these settings."""
        if self._scales:
            kept = {key: state_dict[key] for key in ("scale", GROWTH_TRACKER)}
            super().load_state_dict({**self.state_dict(), **kept})

    # The calls of the loop around it.

    def has_uncounted_steps(self) -> bool:
        """Whether an optimizer has stepped since the last `finish`."""
        return any(each.stage in HAS_STEPPED for each in self.windows.values())

    def finish(self) -> None:
        """Update the scale if that is still to do, and count the steps.

        An overflow lowers the scale even if the training left out the step, for example
        because of the norm.
        """
        if self.is_rehearsing:
            return
        windows = self.windows.values()
        awaiting = {each.stage for each in windows if each.stage in AWAITS_UPDATE}
        if awaiting and not (
            awaiting == {Stage.DROPPED} and self._holds_scaled_gradients()
        ):
            self.update()
        for window in windows:
            if window.stage is Stage.UPDATED:
                window.count()
                self.left_out.step()

    def loss_scale(self) -> torch.Tensor:
        """The current scale, (), float32, on the device; 1 without a scaler."""
        scaled: torch.Tensor = super().scale(self._one)
        return scaled

    def loss_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The current scale, and the scale before the last update; see `loss_scale`."""
        now = self.loss_scale()
        return (
            now,
            now if self._scale_before_update is None else self._scale_before_update,
        )

    # Calls for an unmodified trial, whose code knows nothing of a scaler.

    def take_true_gradients(self, window: Window) -> None:
        """Prepare a step with gradients that are already unscaled, in any stage."""
        if window.stage in HAS_STEPPED:  # a second step in a batch
            self.finish()
        self.has_scaled = True
        if self._scales and window.found_inf is not None:
            self.note(window.optimizer, window.found_inf)
        elif self._scales:
            self._note_nothing(window.optimizer)
        window.move("unscale")

    def note(self, whose: object, found_inf: torch.Tensor) -> None:
        """Give the next `update` an outcome, and mark the gradients as unscaled.

        Args:
            whose: The optimizer of the gradients, or any object that stands for them.
            found_inf: Whether the gradients overflowed, (), float32, on the device; not
                0 if they did.
        """
        state = states_of_steps(self)[id(whose)]
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.UNSCALED

    # Internals.

    def _with_new_casts(
        self, closure: Callable[[], Any], args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """The arguments of a step, with a closure that clears autocast's cache first.

        Raises:
            ConfigError: if there is a loss scale.
        """
        if self._scales:
            raise self.windows.words.error_of(Mistake.TAKES_CLOSURE)
        anew = partial(_call_with_new_casts, closure)
        return (
            ((anew, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": anew})
        )

    def _gradients(self) -> list[torch.Tensor]:
        return gradients_of(self.parameters())

    def _holds_scaled_gradients(self) -> bool:
        """Whether there are scaled gradients that a new scale must not divide."""
        windows = self.windows.values()
        return any(
            each.stage in MAY_BE_SCALED and each.has_gradient() for each in windows
        )

    def _refuse_clip(self, clip: Clip) -> None:
        """Raise if torch is about to clip a gradient that is still scaled."""
        if self.is_rehearsing or not self.has_scaled:
            return
        scaled = {parameter.grad for parameter in self.parameters()}
        for optimizer, window in self.windows.items():
            if window.stage not in MAY_BE_SCALED:
                scaled -= {parameter.grad for parameter in parameters_of(optimizer)}
        if not scaled.isdisjoint(clip.gradients):
            raise self.windows.words.error_of(Mistake.CLIPS_SCALED)

    def _keep_what_was_found(self, optimizer: object) -> None:
        """Save the outcome of dropped gradients for `update`; allow a new unscale."""
        states = states_of_steps(self)
        state = states.pop(id(optimizer))
        states[id(state)] = state

    def _note_nothing(self, optimizer: object) -> None:
        self.note(optimizer, torch.zeros_like(scale_in(self)))


def _call_with_new_casts(closure: Callable[[], Any]) -> Any:
    """Clear autocast's cache, as the weights may have moved, and call the closure."""
    torch.clear_autocast_cache()
    return closure()
