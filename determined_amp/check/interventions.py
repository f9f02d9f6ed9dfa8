"""What the doctor does to a training: it makes overflows and moves loss scales.

A right training gets the same updates: steps with an overflow are skipped, and a scale
that is a power of two changes nothing beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.torch_private import (
    replace_scale_tensor,
    scale_tensor,
    version_of,
)

# Where less than this is left to divide by, a scale stays.
_WORTH = 4.0


@dataclass(frozen=True)
class Moves:
    """How far a scale is moved."""

    by: float = 256.0  # it is divided by this
    least: float = (
        16.0  # and stays above this: float16 has few digits for small gradients
    )


@dataclass
class _Moved:
    """What is known of one scaler."""

    windows: int = 0  # that may have been moved
    decided: bool = False  # about this window
    kept: torch.Tensor | None = None  # the scale that comes back after the window


class ScaleMoves:
    """Divides the scale of each scaler in half of its windows, from a batch to its
    `update`.

    Which windows follows no period, so that a training whose batches alternate is not
    mistaken. `update` puts the scale back: a training that compares the scale before
    and after it sees no decrease.

    Args:
        rests: Tells whether the next window is to be left alone.
        moves: How far; None for not at all.
    """

    def __init__(self, rests: Callable[[], bool], moves: Moves | None) -> None:
        self._moves = moves
        self._rests = rests
        self._known: dict[torch.amp.GradScaler, _Moved] = {}

    @property
    def is_moved(self) -> bool:
        """Whether a scale is moved now."""
        return any(moved.kept is not None for moved in self._known.values())

    def begin(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        """A window may begin here."""
        for scaler in scalers:
            moved = self._known.setdefault(scaler, _Moved())
            if scale_tensor(scaler) is not None and not moved.decided:
                moved.decided = True
                if self._moves is not None and not self._rests():
                    self._move(scaler, moved, self._moves)

    def _move(self, scaler: Any, moved: _Moved, how: Moves) -> None:
        moved.windows += 1
        scale = float(scaler.get_scale())
        low = max(scale / how.by, how.least)
        in_this_one = moved.windows.bit_count() % 2  # the Thue-Morse sequence
        if in_this_one and scale >= low * _WORTH:
            moved.kept = scale_tensor(scaler)
            replace_scale_tensor(scaler, torch.full_like(moved.kept, low))

    def has_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A scaler has multiplied a loss: its scale stays until its update."""
        self._known.setdefault(scaler, _Moved()).decided = True

    def update(self, scaler: Any, own: Callable[[], None], *, sets: bool) -> None:
        """Update a scale and put it back.

        Args:
            scaler: The scaler.
            own: Its own `update`.
            sets: Whether that sets the scale to a number.
        """
        moved = self._known.setdefault(scaler, _Moved())
        kept, moved.kept, moved.decided = moved.kept, None, False
        if kept is None or sets:
            own()
            return
        before = scale_tensor(scaler).clone()
        own()
        ratio = float(scale_tensor(scaler) / before)
        # Where the floor of a scaler has stopped it, the scale that comes back has not
        # moved.
        factors = (scaler.get_growth_factor(), scaler.get_backoff_factor())
        replace_scale_tensor(scaler, kept.mul_(ratio if ratio in factors else 1.0))

    def end(self) -> None:
        """Put back what a training has left moved."""
        for scaler, moved in self._known.items():
            if moved.kept is not None:
                replace_scale_tensor(scaler, moved.kept)
                moved.kept = None


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
        self._true: dict[torch.Tensor, tuple[tuple[int, int], torch.Tensor]] = {}

    def make(self, weights: Iterable[torch.Tensor]) -> None:
        """Make the gradients of these weights overflow."""
        for weight in weights:
            gradient = weight.grad
            if gradient is not None:
                made = id(gradient), version_of(gradient)
                self._true[weight] = made, gradient.detach().clone()
                _write(gradient, gradient.data * math.inf)

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
            Whether there were any.
        """
        has_given = False
        for weight in weights:
            _, values = self._true.pop(weight, (None, None))
            if values is not None and weight.grad is not None:
                _write(weight.grad, values * factor)
                has_given = True
        return has_given

    def are_untouched(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether the gradients are still those that were made to overflow."""
        made = [
            (weight.grad, self._true[weight][0])
            for weight in weights
            if weight in self._true
        ]
        return bool(made) and all(
            gradient is not None and (id(gradient), version_of(gradient)) == key
            for gradient, key in made
        )

    def are_in(self, weights: Iterable[torch.Tensor]) -> bool:
        """Whether overflows are in the gradients of these weights."""
        return not self._true.keys().isdisjoint(weights)

    def forget(self, weights: Iterable[torch.Tensor]) -> None:
        """These gradients are gone."""
        for weight in weights:
            self._true.pop(weight, None)


def _write(gradient: torch.Tensor, values: torch.Tensor) -> None:
    """Give a gradient other values, which does not change its version."""
    if gradient.is_sparse:
        gradient.data = values  # `data` of a sparse one is a copy
    else:
        gradient.data.copy_(values)
