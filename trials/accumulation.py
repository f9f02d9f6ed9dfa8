"""One exchange of gradients per optimizer step, not one per batch of its accumulation window.

Determined 0.38.1 enters `no_sync` around the backward alone. DistributedDataParallel decides in the
forward whether the backward after it exchanges gradients, so they are exchanged after every batch.
"""

from __future__ import annotations

from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def share_gradients_once(context: pytorch.PyTorchTrialContext, aggregation_frequency: int) -> None:
    """From now on only the last batch of a window averages the gradients over the ranks.

    By then they are the sums over the window: an average of sums, the same on every rank.

    Args:
        context: The trial's context; its wrapped models are told before each forward.
        aggregation_frequency: Batches per optimizer step.
    """

    def tell(model: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            last = (context.current_train_batch() + 1) % aggregation_frequency == 0
            model.require_backward_grad_sync = last  # type: ignore[assignment]  # of DDP, a bool

    for model in context.models:
        if isinstance(model, DistributedDataParallel):
            model.register_forward_pre_hook(tell)
