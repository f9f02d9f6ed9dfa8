"""Accumulation over several batches: one exchange of gradients per step, and one
division.

Determined 0.38.1 enters `no_sync` around the backward alone. DistributedDataParallel
decides in the forward whether the backward after it exchanges gradients, so they are
exchanged after every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from determined_amp.trial.determined_private import average_gradients_by


def average_at_once(context: pytorch.PyTorchTrialContext) -> None:
    """Average the gradients of an accumulation window in one kernel, not one per
    parameter.

    Args:
        context: The trial's context.
    """

    def average_gradients(parameters: Iterable[torch.Tensor], divisor: int) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if (
            divisor > 1
            and gradients
            and not any(gradient.is_sparse for gradient in gradients)
        ):
            torch._foreach_div_(gradients, float(divisor))
        elif divisor > 1:
            for gradient in gradients:
                gradient.div_(float(divisor))

    average_gradients_by(context, average_gradients)


def share_gradients_once(
    context: pytorch.PyTorchTrialContext, is_update_batch: Callable[[int], bool]
) -> list[RemovableHandle]:
    """Average the gradients over the ranks only in the last batch of a window.

    By then they are sums over the window, so every rank gets the same average of sums.

    Args:
        context: The trial's context; its wrapped models are told before each forward.
        is_update_batch: Whether a step follows the batch with that index. It must be
            false for a batch that is rehearsed to find a fault, because every rank
            rehearses its own.
    """

    def set_exchange(model: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            last = is_update_batch(context.current_train_batch())
            model.require_backward_grad_sync = last  # type: ignore[assignment]  # of DDP, a bool

    return [
        model.register_forward_pre_hook(set_exchange)
        for model in context.models
        if isinstance(model, DistributedDataParallel)
    ]
