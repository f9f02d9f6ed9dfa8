"""Validation metrics as means over samples, for any batch size and number of slots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from determined import pytorch


class MeanMetrics(pytorch.MetricReducer):
    """Averages each metric over all samples.

    Determined's own averages give every batch the same weight, even a smaller last one.

    Args:
        context: The trial's context; the reducer registers itself there.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self._device = context.device
        self._sums: dict[str, torch.Tensor] = {}
        self._samples = 0
        context.wrap_reducer(self, for_training=False)

    def add(self, sums: Mapping[str, torch.Tensor], samples: int) -> dict[str, float]:
        """Add one batch, without synchronisation.

        Args:
            sums: The sum of each metric over the samples of the batch, ().
            samples: Number of samples in the batch.

        Returns:
            An empty dict for `evaluate_batch` to return, because the reducer reports
            the metrics.
        """
        for name, value in sums.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros(
                    (), dtype=torch.float64, device=self._device
                )
            self._sums[name].add_(value)
        self._samples += samples
        return {}

    def reset(self) -> None:
        self._sums.clear()
        self._samples = 0

    def per_slot_reduce(self) -> tuple[dict[str, float], int]:
        values = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        return dict(zip(self._sums, values, strict=True)), self._samples

    def cross_slot_reduce(
        self, per_slot_metrics: list[tuple[dict[str, float], int]]
    ) -> dict[str, Any]:
        samples = sum(count for _, count in per_slot_metrics)
        return {
            name: sum(sums[name] for sums, _ in per_slot_metrics) / samples
            if samples
            else math.nan
            for name in per_slot_metrics[0][0]
        }
