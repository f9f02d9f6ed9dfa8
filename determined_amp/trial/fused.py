"""Fused optimizers, which take scale and overflow flag on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from determined_amp.amp.tensors import parameters_of


def fuse(optimizer: torch.optim.Optimizer, models: Iterable[nn.Module] = ()) -> bool:
    """Make an optimizer fused that was made without `fused`; returns whether it is.

    On CUDA a fused optimizer takes scale and overflow flag as device tensors. With any other,
    `GradScaler.step` waits for the device. Only before its first step, and only where nothing but
    its speed changes: a fused one takes no sparse gradients, and hooks of the trial's would be
    called for skipped steps, too.

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
