"""Disturbs a training on purpose: makes gradients overflow, and moves loss scales.

The recorder uses `ScaleMoves`, and `step_gradients.py` uses `ForcedOverflows`. A
correct training gets the same updates: it skips the steps with an overflow, and a loss
scale that is divided by a power of two changes nothing beyond rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.torch_private import scale_tensor, version_of

# A scale is divided by `_MOST` at most, and stays at `_LEAST` or above, because float16
# has few digits for small gradients. If this allows a division by less than `_WORTH`,
# the scale is not moved.
_MOST, _LEAST, _WORTH = 256.0, 16.0, 4.0


# The identity of a gradient tensor, and the version of its values.
Key = tuple[int, int]


@dataclass
class _MovedScale:
    """What is known of one scaler."""

    windows: int = 0  # windows whose scale could be moved
    decided: bool = False  # whether this window was decided on
    true_scale: float | None = None  # the scale to put back; None if not moved


class ScaleMoves:
    """Divides the scale of each scaler in half of its windows.

    The scale is divided when a batch begins. `update` puts it back, or, after a skipped
    step, the next window does. So a training that compares the scale before and after
    `update` sees a decrease exactly if the step was skipped.

    The choice of windows follows no period, so that a training whose batches alternate
    is not mistaken for one that depends on the scale.

    Args:
        rests: Tells whether to leave the scale alone in the next window.
    """

    def __init__(self, rests: Callable[[], bool]) -> None:
        self._rests = rests
        self._known: dict[Any, _MovedScale] = defaultdict(_MovedScale)

    @property
    def is_moved(self) -> bool:
        """Whether a scale is divided now."""
        return any(moved.true_scale is not None for moved in self._known.values())

    def begin(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        """Move each scale, or leave it, if a window begins here."""
        for scaler in scalers:
            moved, scale = self._known[scaler], scale_tensor(scaler)
            is_decided, moved.decided = moved.decided, True
            if is_decided or scale is None:
                continue
            self._put_back(scaler)
            if self._rests():
                continue
            moved.windows += 1
            most = min(_MOST, float(scale) / _LEAST)
            # The Thue-Morse sequence has no period. A power of two rounds nothing.
            if moved.windows.bit_count() % 2 and most >= _WORTH:
                moved.true_scale = float(scale)
                scale.div_(2.0 ** int(math.log2(most)))

    def update(self, scaler: Any, own: Callable[[], None], *, sets: bool) -> None:
        """Call a scaler's own `update`, and put its scale back.

        Args:
            scaler: The scaler.
            own: Its own `update`.
            sets: Whether the training gives `update` a new scale.
        """
        moved = self._known[scaler]
        moved.decided = False
        if moved.true_scale is None or sets:
            moved.true_scale = None
            own()
            return
        before = float(scale_tensor(scaler))
        own()
        ratio = float(scale_tensor(scaler)) / before
        # If a floor stopped the divided scale, the true scale does not change.
        if ratio in (scaler.get_growth_factor(), scaler.get_backoff_factor()):
            moved.true_scale *= ratio
        if ratio >= 1:
            self._put_back(scaler)

    def end(self) -> None:
        """Put back every scale that is still divided."""
        for scaler in self._known:
            self._put_back(scaler)

    def _put_back(self, scaler: Any) -> None:
        moved = self._known[scaler]
        if moved.true_scale is not None:
            scale_tensor(scaler).fill_(moved.true_scale)
            moved.true_scale = None


class ForcedOverflows:
    """Makes gradients overflow in some windows, and keeps the true gradients.

    A step that is about to use an overflow gets the true gradients back. So no forced
    overflow reaches weights, moments or averages.

    Args:
        windows: The windows of each optimizer, counted from 0.
    """

    def __init__(self, windows: Collection[int]) -> None:
        self.windows = windows
        # By weight: the key of the gradient that overflows, and its true values.
        self._true_gradients: dict[torch.Tensor, tuple[Key, torch.Tensor]] = {}

    def make(self, weights: Iterable[torch.Tensor]) -> None:
        """Multiply the gradients of these weights by infinity."""
        for weight in weights:
            if weight.grad is not None:
                self._true_gradients[weight] = (
                    version_key(weight),
                    weight.grad.detach().clone(),
                )
                _write(weight.grad, weight.grad.data * math.inf)

    def divide(self, weights: Iterable[torch.Tensor], divisor: float) -> None:
        """Divide the true gradients, too, as a scaler has divided the gradients."""
        for weight in weights:
            if weight in self._true_gradients:
                self._true_gradients[weight][1].div_(divisor)

    def give_back(self, weights: Iterable[torch.Tensor], factor: float = 1.0) -> bool:
        """Replace overflows by the true gradients.

        Args:
            weights: The weights of the gradients.
            factor: What the training multiplies its gradients by.

        Returns:
            Whether a gradient overflowed that was not yet the true one again.
        """
        has_given = False
        for weight in weights:
            _, values = self._true_gradients.pop(weight, (None, None))
            if values is None or weight.grad is None:
                continue
            true = values * factor
            # A training with buffers of its own may have put back the true values.
            has_given |= not torch.allclose(weight.grad, true, rtol=0.01)
            _write(weight.grad, true)
        return has_given

    def stop(self) -> None:
        """Take back all overflows, and make no more.

        The recorder calls this if the training raises an error on an overflow.
        """
        self.give_back([*self._true_gradients])
        self.windows = ()

    def are_untouched(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether the forced overflows are still in these weights' gradients."""
        made = [weight for weight in weights if weight in self._true_gradients]
        return bool(made) and all(
            version_key(each) == self._true_gradients[each][0] for each in made
        )

    def are_in(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether a gradient of these weights was made to overflow."""
        return not self._true_gradients.keys().isdisjoint(weights)

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """Forget the overflows of these weights, whose gradients are gone."""
        for weight in weights:
            self._true_gradients.pop(weight, None)


def version_key(weight: torch.Tensor) -> Key:
    """A key that changes with the gradient tensor of a weight and with its values."""
    gradient = weight.grad
    return (0, 0) if gradient is None else (id(gradient), version_of(gradient))


def _write(gradient: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a gradient without changing its version."""
    if gradient.is_sparse:
        gradient.data = values  # `data` of a sparse tensor is a copy
    else:
        gradient.data.copy_(values)
