"""What the optimizers of a trial need if its code knows nothing of mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch
from torch import nn

from determined_amp.amp.scaler import LossScaler
from determined_amp.amp.steps import give_hooks
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


class StepIsSkippedError(Exception):
    """Ends a step at its beginning; see `let_skip`."""


def let_skip(optimizers: Iterable[torch.optim.Optimizer]) -> set[torch.optim.Optimizer]:
    """Let a hook end a step by `StepIsSkippedError`, so that nothing of it happens.

    Without gradients a step of torch's own classes changes nothing either. One of other classes may
    decay the weights, count or fail then.

    Returns:
        Those of other classes.
    """
    others = {optimizer for optimizer in optimizers if not _is_torchs(optimizer)}
    for optimizer in others:
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            give_hooks(optimizer)
        optimizer.step = _skippable(optimizer.step)  # type: ignore[method-assign]
    return others


def _skippable(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def skippable(*args: Any, **kwargs: Any) -> Any:
        with suppress(StepIsSkippedError):
            return step(*args, **kwargs)

    return skippable


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")


class WeightsAside:
    """Makes sure that weights which an optimizer has moved away come back, also if it skips a step.

    Sharpness-aware minimisation and its like move the weights away before the last backward of a
    step, and back in the step. Only classes that are not torch's own do that.

    Args:
        scaler: That of the training.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        # The norms of the weights before the first backward of a step.
        self._norms: dict[torch.optim.Optimizer, torch.Tensor] = {}
        self._is_putting_back = False

    def remember(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note where the weights are; called before every backward."""
        for optimizer in optimizers:
            if not _is_torchs(optimizer) and optimizer not in self._norms:
                self._norms[optimizer] = _norms_of(optimizer)

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every step."""
        self._norms.pop(optimizer, None)

    def put_back(self, optimizer: torch.optim.Optimizer, *, zero_grad: bool) -> None:
        """After a skipped step: if the weights are elsewhere, step with gradients of 0.

        Args:
            optimizer: The one whose step was skipped.
            zero_grad: Whether the gradients are zeroed afterwards.
        """
        before = self._norms.get(optimizer)
        if before is None or torch.equal(_norms_of(optimizer), before):
            return
        for parameter in parameters_of(optimizer):
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self._is_putting_back = self._scaler.stepping = True
        try:
            optimizer.step()
        finally:
            self._is_putting_back = self._scaler.stepping = False
        if zero_grad:
            optimizer.zero_grad()

    def is_within_put_back(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the optimizer inside of one that puts its weights back."""
        return self._is_putting_back and optimizer not in self._norms


def _norms_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.stack(torch._foreach_norm([p.detach() for p in parameters_of(optimizer)]))
