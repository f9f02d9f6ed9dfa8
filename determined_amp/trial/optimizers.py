"""What the optimizers of a trial need if its code knows nothing of mixed precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from determined_amp.amp.tensors import parameters_of


def fuse(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module] = ()) -> bool:
    """Make an optimizer fused, before its first step; returns whether it is fused now.

    On CUDA a fused optimizer reads loss scale and overflow flag on the device. With any other,
    `GradScaler.step` waits for the device. An optimizer stays as it is if more than its speed would
    change: a fused one takes no sparse gradients, and calls the trial's hooks for skipped steps.

    Args:
        optimizer: Any of torch.
        models: Those of the trial, whose modules tell which gradients are sparse.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return True
    own_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    modules = (module for model in models for module in model.modules())
    sparse = {p for m in modules if getattr(m, "sparse", False) is True for p in m.parameters()}
    if own_hooks or _has_own_step(optimizer) or not sparse.isdisjoint(parameters_of(optimizer)):
        return False
    if optimizer.state or any(
        group.get("foreach")
        or group.get("differentiable")
        or group.get("dampening")
        or not all(torch.is_floating_point(parameter) for parameter in group["params"])
        for group in groups
    ):
        return False
    for settings in (optimizer.defaults, *groups):
        settings.update(fused=True, foreach=False)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # GradScaler asks
    return True


def _has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else than a scheduler of torch has replaced its method."""
    step: Any = vars(optimizer).get("step")
    while hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter"):  # torch 2.3
        step = step.__wrapped__
    return step is not None and step is not type(optimizer).step
