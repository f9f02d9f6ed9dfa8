"""Moves loss scales by powers of two in some windows: a right training gets the same updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

# Where less than this is left to divide by, a scale stays.
_WORTH = 4.0


@dataclass(frozen=True)
class Moves:
    """How far a scale is moved."""

    by: float = 256.0  # it is divided by this
    least: float = 16.0  # and stays above this: float16 has few digits for small gradients


class _Moved:
    """What is known of one scaler."""

    def __init__(self) -> None:
        self.window = 0  # of those that may be moved, this one
        self.decided = False  # about this window
        self.kept: torch.Tensor | None = None  # the scale that comes back after the window


class ScaleMoves:
    """Divides the scale of each scaler in half of its windows, from a batch to its `update`.

    Which windows follows no period, so that a training whose batches alternate is not mistaken.
    `update` puts the scale back: a training that compares the scale before and after it sees no
    decrease.

    Args:
        rests: Tells whether the next window is to be left alone.
        moves: How far; None for not at all.
    """

    def __init__(self, rests: Callable[[], bool], moves: Moves | None) -> None:
        self.is_moved = False  # a scale is moved now
        self._moves = moves
        self._rests = rests
        self._known: dict[torch.amp.GradScaler, _Moved] = {}

    def begin(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        """A window may begin here."""
        if self._moves is None:
            return
        for scaler in scalers:
            moved = self._known.setdefault(scaler, _Moved())
            if moved.decided or not scaler.is_enabled() or scaler._scale is None:
                continue
            moved.decided = True
            if self._rests():
                continue
            moved.window += 1
            scale = float(scaler.get_scale())
            low = max(scale / self._moves.by, self._moves.least)
            if moved.window.bit_count() % 2 and scale >= low * _WORTH:  # the Thue-Morse sequence
                moved.kept = scaler._scale
                scaler._scale = torch.full_like(scaler._scale, low)
                self.is_moved = True

    def has_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A scaler has multiplied a loss: its scale stays until its update."""
        if self._moves is not None:
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
        before = scaler._scale.clone() if kept is not None else None
        own()
        if kept is not None and not sets:
            ratio = float(scaler._scale / before)
            factors = (scaler.get_growth_factor(), scaler.get_backoff_factor())
            scaler._scale = kept.mul_(ratio if ratio in factors else 1.0)
        self.is_moved = any(each.kept is not None for each in self._known.values())

    def end(self) -> None:
        """Put back what a training has left moved."""
        for scaler, moved in self._known.items():
            if moved.kept is not None:
                scaler._scale, moved.kept = moved.kept, None
