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
        """The values of all slots, on each of them."""


class OneSlot:
    """A training in one process."""

    rank = 0
    size = 1

    def allgather(self, value: Any, /) -> list[Any]:
        return [value]
