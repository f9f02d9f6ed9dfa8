"""What the doctor does to a training: it makes overflows and moves loss scales.

A right training gets the same updates: steps with an overflow are skipped, and a scale
that is a power of two changes nothing beyond rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.torch_private import scale_tensor, version_of

# A scale is divided by this at most, or by what leaves as much as `_LEAST`: float16 has
# few digits for small gradients. Where that is less than `_WORTH`, it stays.
_MOST, _LEAST, _WORTH = 256.0, 16.0, 4.0


Key = tuple[int, int]


@dataclass
class _Moved:
    """What is known of one scaler."""

    windows: int = 0  # that may have been moved
    decided: bool = False  # about this window
    true: float | None = None  # the scale that comes back, if it is moved now


class ScaleMoves:
    """Divides the scale of each scaler in half of its windows, from a batch to its
    `update`.

    Which windows follows no period, so that a training whose batches alternate is not
    mistaken. `update` puts the scale back, or after a skipped step the next window
    does: a training that compares the scale before and after `update` sees a decrease
    if the step was skipped, and else none.

    Args:
        rests: Tells whether the next window is to be left alone.
    """

    def __init__(self, rests: Callable[[], bool]) -> None:
        self._rests = rests
        self._known: dict[Any, _Moved] = defaultdict(_Moved)

    @property
    def is_moved(self) -> bool:
        """Whether a scale is moved now."""
        return any(moved.true is not None for moved in self._known.values())

    def begin(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        """A window may begin here."""
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
            # The Thue-Morse sequence, and a power of two, which rounds nothing.
            if moved.windows.bit_count() % 2 and most >= _WORTH:
                moved.true = float(scale)
                scale.div_(2.0 ** int(math.log2(most)))

    def update(self, scaler: Any, own: Callable[[], None], *, sets: bool) -> None:
        """Update a scale and put it back.

        Args:
            scaler: The scaler.
            own: Its own `update`.
            sets: Whether that sets the scale to a number.
        """
        moved = self._known[scaler]
        moved.decided = False
        if moved.true is None or sets:
            moved.true = None
            own()
            return
        before = float(scale_tensor(scaler))
        own()
        ratio = float(scale_tensor(scaler)) / before
        # Where a floor has stopped the moved scale, the one that comes back stays.
        if ratio in (scaler.get_growth_factor(), scaler.get_backoff_factor()):
            moved.true *= ratio
        if ratio >= 1:
            self._put_back(scaler)

    def end(self) -> None:
        """Put back what a training has left moved."""
        for scaler in self._known:
            self._put_back(scaler)

    def _put_back(self, scaler: Any) -> None:
        moved = self._known[scaler]
        if moved.true is not None:
            scale_tensor(scaler).fill_(moved.true)
            moved.true = None


class ForcedOverflows:
    """Makes gradients overflow in some windows, and keeps the true ones.

    A step that is about to use an overflow gets the true gradients back, so that no
    overflow of the doctor's reaches weights, moments or averages.

    Args:
        windows: The windows of each optimizer, from 0.
    """

    def __init__(self, windows: Collection[int]) -> None:
        self.windows = windows
        # Of a weight: which gradient was made to overflow, and its values.
        self._true: dict[torch.Tensor, tuple[Key, torch.Tensor]] = {}

    def make(self, weights: Iterable[torch.Tensor]) -> None:
        """Make the gradients of these weights overflow."""
        for weight in weights:
            if weight.grad is not None:
                self._true[weight] = version_key(weight), weight.grad.detach().clone()
                _write(weight.grad, weight.grad.data * math.inf)

    def divide(self, weights: Iterable[torch.Tensor], divisor: float) -> None:
        """A scaler has divided the gradients: their true ones are divided, too."""
        for weight in weights:
            if weight in self._true:
                self._true[weight][1].div_(divisor)

    def give_back(self, weights: Iterable[torch.Tensor], factor: float = 1.0) -> bool:
        """Replace overflows by the true gradients.

        Args:
            weights: Those of the gradients.
            factor: What the training multiplies true gradients by.

        Returns:
            Whether there were any, and not the true ones already.
        """
        has_given = False
        for weight in weights:
            _, values = self._true.pop(weight, (None, None))
            if values is None or weight.grad is None:
                continue
            true = values * factor
            # A training that sums in buffers of its own has put them back itself.
            has_given |= not torch.allclose(weight.grad, true, rtol=0.01)
            _write(weight.grad, true)
        return has_given

    def stop(self) -> None:
        """Take all back and make no more: the training raises an error on one."""
        self.give_back([*self._true])
        self.windows = ()

    def are_untouched(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether the gradients are still those that were made to overflow."""
        made = [weight for weight in weights if weight in self._true]
        return bool(made) and all(
            version_key(each) == self._true[each][0] for each in made
        )

    def are_in(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether overflows are in the gradients of these weights."""
        return not self._true.keys().isdisjoint(weights)

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """These gradients are gone."""
        for weight in weights:
            self._true.pop(weight, None)


def version_key(weight: torch.Tensor) -> Key:
    """What differs as soon as its gradient is another or has other values."""
    gradient = weight.grad
    return (0, 0) if gradient is None else (id(gradient), version_of(gradient))


def _write(gradient: torch.Tensor, values: torch.Tensor) -> None:
    """Give a gradient other values, which does not change its version."""
    if gradient.is_sparse:
        gradient.data = values  # `data` of a sparse one is a copy
    else:
        gradient.data.copy_(values)
