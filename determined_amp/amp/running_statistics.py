"""Keeps the running statistics of normalisation layers finite through skipped steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

logger = logging.getLogger(__name__)

# The buffers of a BatchNorm or InstanceNorm that its forward writes.
_STATISTICS = ("running_mean", "running_var")


class RunningStatistics:
    """The running statistics of normalisation layers.

    A forward that overflows writes infinity into them. Skipping the step does not undo
    that, so every later validation would compute NaN. Such statistics are reset to
    their values at the last report or validation. Other buffers are left alone: a mask
    may be -inf.

    Args:
        models: The models with the layers.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        named = (pair for model in models for pair in model.named_buffers())
        buffers = (
            buffer for name, buffer in named if name.rpartition(".")[2] in _STATISTICS
        )
        self._buffers = list(dict.fromkeys(buffers))
        self._good = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def repair(self) -> None:
        """Restore buffers that are not finite, save the others; synchronises once."""
        if not self._buffers:
            return
        poisoned = (
            torch.stack([torch.isfinite(buffer).all() for buffer in self._buffers]) == 0
        )
        for bad, buffer, good in zip(poisoned, self._buffers, self._good, strict=True):
            good.copy_(torch.where(bad, good, buffer))
            buffer.copy_(good)
        count = int(poisoned.sum())
        if count:
            logger.warning(
                "%d running statistics were not finite after an overflow: put back to "
                "what they were at the last report or validation",
                count,
            )
