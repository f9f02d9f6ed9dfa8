"""The processes of a training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import distributed


class Slots(Protocol):
    """The processes of a training; `DistributedContext` of Determined is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def allgather(self, value: Any, /) -> list[Any]:
        """Return the values of all slots, in the order of their ranks, on every
        slot.
        """


class OneSlot:
    """A training in one process."""

    rank = 0
    size = 1

    def allgather(self, value: Any, /) -> list[Any]:
        return [value]


class ProcessGroup:
    """The processes of torch's default group; only this one before it joins a group.

    Args:
        device: Where this process computes, which need not be the current GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def rank(self) -> int:
        return distributed.get_rank() if self._has_joined() else 0

    @property
    def size(self) -> int:
        return distributed.get_world_size() if self._has_joined() else 1

    def allgather(self, value: Any, /) -> list[Any]:
        if not self._has_joined():
            return [value]
        values: list[Any] = [None] * self.size
        # NCCL exchanges objects through the current GPU. Each process must use its own.
        is_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if is_gpu else nullcontext():
            distributed.all_gather_object(values, value)
        return values

    def _has_joined(self) -> bool:
        return distributed.is_available() and distributed.is_initialized()
