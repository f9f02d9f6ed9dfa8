"""Replaces an attribute for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Replace an attribute of any object inside this block, where it takes no argument for it."""
    own = vars(owner)
    was_own, before = name in own, own.get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
