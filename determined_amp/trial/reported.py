"""Hands what the heart has summed to Determined, which asks for it once per report."""

from __future__ import annotations

from typing import Any

from determined import pytorch

from determined_amp.amp.metrics import TrainingMetrics


class ReportedMetrics(pytorch.MetricReducer):
    """The metrics of a training in its training reports.

    Args:
        metrics: What is reported.
    """

    def __init__(self, metrics: TrainingMetrics) -> None:
        self._metrics = metrics

    def reset(self) -> None:
        """Called by Determined before every stretch of training and every validation."""
        self._metrics.reset()

    def per_slot_reduce(self) -> dict[str, Any]:
        return self._metrics.per_slot_reduce()

    def cross_slot_reduce(self, per_slot_metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return self._metrics.cross_slot_reduce(per_slot_metrics)
