"""Learning-rate schedules: a warm-up, then a constant rate or a cosine."""

from __future__ import annotations

import enum
import math

import torch
from torch.optim import lr_scheduler


class LRSchedule(enum.Enum):
    """How the learning rate changes after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


def warmup_then(
    optimizer: torch.optim.Optimizer,
    schedule: LRSchedule,
    warmup_steps: int,
    total_steps: int,
) -> lr_scheduler.LambdaLR:
    """Make a scheduler: a linear warm-up to the optimizer's rate, then `schedule`.

    The cosine (Loshchilov and Hutter 2017, arXiv 1608.03983, one cycle) would reach 0
    just after the last step. Later steps keep the rate of the last step.

    Args:
        optimizer: Each of its parameter groups warms up to its own rate.
        schedule: Shape after the warm-up.
        warmup_steps: Length of the warm-up, in optimizer steps.
        total_steps: Optimizer steps of the whole run, warm-up included; at least 1.
    """

    def factor(step: int) -> float:
        step = min(step, total_steps - 1)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        if schedule is LRSchedule.CONSTANT:
            return 1.0
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return lr_scheduler.LambdaLR(optimizer, factor)
