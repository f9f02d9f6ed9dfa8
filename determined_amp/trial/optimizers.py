"""What the optimizers of a trial need if its code knows nothing of mixed precision."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from determined_amp.amp.tensors import parameters_of
from determined_amp.amp.torch_private import give_found_inf


def fuse(optimizer: Optimizer, models: Iterable[nn.Module] = ()) -> bool:
    """Make an optimizer fused, before its first step; returns whether it is fused now.

    On CUDA a fused optimizer reads loss scale and overflow flag on the device. With any
    other, `GradScaler.step` waits for the device. An optimizer stays as it is if more
    than its speed would change: a fused one takes no sparse gradients.

    Args:
        optimizer: Any of torch.
        models: Those of the trial, whose modules tell which gradients are sparse.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return False
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return True
    modules = (module for model in models for module in model.modules())
    sparse = {
        p
        for m in modules
        if getattr(m, "sparse", False) is True
        for p in m.parameters()
    }
    if _has_own_step(optimizer) or not sparse.isdisjoint(parameters_of(optimizer)):
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
    give_found_inf(optimizer)
    return True


def _has_own_step(optimizer: Optimizer) -> bool:
    """Whether the method is another one than its class has, but for what wraps that.

    Schedulers of torch wrap it.
    """
    step, of_class = (
        inspect.unwrap(optimizer.step),
        inspect.unwrap(type(optimizer).step),
    )
    return getattr(step, "__func__", step) is not of_class
