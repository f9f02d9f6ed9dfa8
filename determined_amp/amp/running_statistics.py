"""Keeps the running statistics of normalisation layers finite through skipped steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

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
        models: The models with the layers. Models and layers may come later, and a
            loaded state may replace buffers: they are looked up by name each time.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._good = {
            name: buffer.detach().clone() for name, buffer in self._buffers().items()
        }

    @torch.no_grad()
    def repair(self) -> None:
        """Restore buffers that are not finite, save the others; synchronises once."""
        buffers = self._buffers()
        if not buffers:
            return
        poisoned = (
            torch.stack([torch.isfinite(each).all() for each in buffers.values()]) == 0
        )
        for bad, (name, buffer) in zip(poisoned, buffers.items(), strict=True):
            good = self._good.get(name, buffer)
            if good.shape == buffer.shape:  # else it belongs to another layer
                buffer.copy_(torch.where(bad, good.to(buffer), buffer))
            self._good[name] = buffer.clone()
        count = int(poisoned.sum())
        if count:
            logger.warning(
                "%d running statistics were not finite after an overflow: put back to "
                "what they were at the last report or validation",
                count,
            )

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The statistics that have a size, by the number of their model and name."""
        return {
            f"{number}.{name}": buffer
            for number, model in enumerate(self._models)
            for name, buffer in model.named_buffers()
            if name.rpartition(".")[2] in _STATISTICS and not is_lazy(buffer)
        }
