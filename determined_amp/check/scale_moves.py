"""Moves loss scales by powers of two in some windows: a right training gets the same
updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.torch_private import replace_scale_tensor, scale_tensor

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
