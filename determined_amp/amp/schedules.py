"""A learning rate that follows the optimizer steps that were applied, not those attempted.

A step that GradScaler skips leaves the weights alone, so the schedule must not move either. Asking
on the host whether a step was skipped costs a device synchronisation, and torch's schedulers count
on the host. Here the whole schedule is a table on the device and the count of applied steps is its
index: two small kernels per step, no synchronisation, right for fused optimizers too
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
    """Keeps every parameter group's learning rate at entry `applied_steps` of a list.

    A fused optimizer reads its rate on the device, so there the list is a table. Any other makes
    the host wait for `found_inf` in `scaler.step` anyway, and computes with numbers: it gets one. A
    constant rate needs neither, the optimizer keeps its own number.

    Args:
        optimizer: Its groups share one rate.
        rates: The rate of every step, from `learning_rates`.
        device: Where the optimizer's parameters are.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rates: list[float], device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._rates = rates
        self._constant = min(rates) == max(rates)
        self._fused = bool(optimizer.defaults.get("fused"))
        # CUDA's fused kernels read a float32; those of a CPU want the number that others are given.
        dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._table = torch.tensor(rates, dtype=dtype, device=device)
        # Kernels write to a whole tensor; its only element, the same memory, is the number in it.
        self._index = torch.zeros(1, dtype=torch.int64, device=device)
        self._rate = self._table[:1].clone()
        self._index_number, self._rate_number = self._index[0], self._rate[0]

    def move_to(self, applied_steps: torch.Tensor) -> None:
        """Use the rate of the next step.

        Args:
            applied_steps: Steps applied so far, (), int64, on the device. No synchronisation if the
                optimizer is fused.
        """
        if self._constant:
            return
        rate = self._on_device(applied_steps) if self._fused else self._on_host(applied_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    # Past the end only if the run is longer than it said: stay on the last rate.

    def _on_device(self, applied_steps: torch.Tensor) -> torch.Tensor:
        torch.clamp(applied_steps, max=len(self._rates) - 1, out=self._index_number)
        torch.index_select(self._table, 0, self._index, out=self._rate)
        return self._rate_number

    def _on_host(self, applied_steps: torch.Tensor) -> float:
        return self._rates[min(int(applied_steps), len(self._rates) - 1)]
