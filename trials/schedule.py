"""A learning rate that follows the optimizer steps that were applied, not those attempted.

A step that GradScaler skips leaves the weights alone, so the schedule must not move either. Asking
on the host whether a step was skipped costs a device synchronisation, and torch's schedulers count
on the host. Here the whole schedule is a table on the device and the count of applied steps is its
index: one small kernel per step, no synchronisation, right for fused optimizers too
(https://github.com/huggingface/accelerate/issues/4242 is what happens otherwise).
"""

from __future__ import annotations

import enum
import math

import torch


class LRSchedule(enum.Enum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


def learning_rates(
    schedule: LRSchedule, learning_rate: float, warmup_steps: int, total_steps: int
) -> list[float]:
    """The learning rate of every optimizer step.

    The warm-up rises linearly and reaches `learning_rate` at step `warmup_steps`. The cosine
    (Loshchilov and Hutter 2017, arXiv 1608.03983, one cycle) falls from there to 0 after the last.

    Args:
        schedule: Shape after the warm-up.
        learning_rate: Peak, reached at the end of the warm-up.
        warmup_steps: Optimizer steps of linear warm-up.
        total_steps: Optimizer steps of the whole run, warm-up included.

    Returns:
        `total_steps` values; entry `i` is used by step `i`, counted from 0.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if schedule is LRSchedule.CONSTANT:
            return 1.0
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return [learning_rate * factor(step) for step in range(total_steps)]


class AppliedStepSchedule:
    """Keeps every parameter group's learning rate at entry `applied_steps` of a table.

    A constant rate needs no table: the optimizer then keeps its plain float.

    Args:
        optimizer: Its groups share one rate. On CUDA it must be fused, which reads the rate on the
            device.
        rates: The rate of every step, from `learning_rates`.
        device: Where the optimizer's parameters are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rates: list[float], device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._constant = min(rates) == max(rates)
        # CUDA's fused kernels read a float32; on a CPU the rate is a Python float in all but name.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._table = torch.tensor(rates, dtype=dtype, device=device)
        self._rate = self._table[:1].clone()

    def move_to(self, applied_steps: torch.Tensor) -> None:
        """Use the rate of the next step.

        Args:
            applied_steps: Steps applied so far, (), int64, on the device. No synchronisation.
        """
        if self._constant:
            return
        # Past the end only if the run is longer than it said: stay on the last rate.
        index = applied_steps.clamp(max=len(self._table) - 1).view(1)
        torch.index_select(self._table, 0, index, out=self._rate)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate[0]
