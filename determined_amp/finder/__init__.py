"""Finds the initial loss scale in one pass over a few batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from determined_amp.finder.found_scale import FoundScale
    from determined_amp.finder.model import find_loss_scale

__all__ = ["FoundScale", "find_loss_scale"]


def __getattr__(name: str) -> Any:
    """Import torch on first use, not with this package."""
    if name in __all__:
        from determined_amp.finder import model  # noqa: PLC0415

        return getattr(model, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
