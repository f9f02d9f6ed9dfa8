"""Sums of many small tensors that cost the host little."""

from __future__ import annotations

import torch


class DeviceSum:
    """A float64 sum of many small device tensors, added up a handful at a time.

    Adding each one costs the host several kernels per batch. Keeping it costs nothing.

    Args:
        device: Where the sum is.
        finite_only: Leave out what is not finite.
    """

    _HANDFUL = 64

    def __init__(self, device: torch.device, *, finite_only: bool = False) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._finite_only = finite_only
        self._waiting: list[torch.Tensor] = []
        self._weight = 1

    def add(self, value: torch.Tensor, weight: int = 1) -> None:
        """Count `weight` times a tensor, (), that nobody changes any more. No synchronisation."""
        if weight != self._weight or len(self._waiting) == self._HANDFUL:
            self.total()
            self._weight = weight
        self._waiting.append(value)

    def total(self) -> torch.Tensor:
        """The sum, (), float64, on the device. No synchronisation."""
        if self._waiting:
            values = torch.stack(self._waiting).double()
            if self._finite_only:
                values = torch.nan_to_num(values, nan=0.0, posinf=0.0)
            self._sum.add_(values.sum(), alpha=self._weight)
            self._waiting.clear()
        return self._sum

    def reset(self) -> None:
        self._waiting.clear()
        self._sum.zero_()
