"""The processes of a training."""

from __future__ import annotations

from typing import Any, Protocol


class Slots(Protocol):
    """The processes of a training; `DistributedContext` of Determined is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the values of all slots, in the order of their ranks, on every slot."""


class OneSlot:
    """A training in one process."""

    rank = 0
    size = 1

    def allgather(self, value: Any, /) -> list[Any]:
        return [value]
