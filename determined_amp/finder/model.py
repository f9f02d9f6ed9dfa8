"""Finds the initial loss scale of a model without a `PyTorchTrial`, from its loss and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from determined import core, pytorch
from torch import nn

from determined_amp.amp.replay import own_copy
from determined_amp.amp.tensors import tensors_of
from determined_amp.finder.advice import FoundScale, run_now
from determined_amp.finder.frozen import FrozenBatch, LossScaleError
from determined_amp.finder.verdict import DEFAULT_LOG2, find

# The default of PyTorch's GradScaler.
_GROWTH_INTERVAL = 2000


def find_loss_scale(
    model: nn.Module,
    loss_fn: Callable[[Any], torch.Tensor],
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    init_scale: float = 2.0**DEFAULT_LOG2,
) -> FoundScale:
    """Find the initial loss scale for float16 training of any model, in one process.

    Nothing is trained: parameters, gradients, buffers and random state are restored.

        loss_fn = lambda batch: model(**batch).loss
        print(find_loss_scale(model, loss_fn, itertools.islice(loader, 4)))

    Args:
        model: The model, with float32 parameters, on its device. It runs in training mode.
        loss_fn: Runs the forward of a batch and returns the loss. It is called under autocast and
            must not call backward. If training accumulates gradients, it must divide the loss as
            training does.
        batches: Training batches of the usual batch size; four are enough. Tensors in tuples,
            lists and dicts are moved to the device.
        device: The model's device; by default the device of its first parameter.
        init_scale: The initial loss scale that training uses now.

    Raises:
        LossScaleError: if an argument is wrong, or no loss scale can be found.
    """
    where = _device(model, device)
    frozen = [LossBatch(model, loss_fn, _to_device(batch, where), where) for batch in batches]
    if not frozen:
        raise LossScaleError("batches: got none; allowed: one batch or more, such as four")
    if not (init_scale > 0 and math.isfinite(init_scale)):
        raise LossScaleError(f"init_scale: got {init_scale}; allowed: more than 0, and finite")
    finding = find(OneProcess([model]), frozen)
    run = run_now(
        type(model).__name__,
        where,
        batches=len(frozen),
        samples=sum(batch.samples for batch in frozen),
        init_scale=init_scale,
        growth_interval=_GROWTH_INTERVAL,
        is_ours=False,
    )
    return FoundScale(finding, run)


class LossBatch(FrozenBatch):
    """One batch for a loss function."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any], torch.Tensor],
        batch: Any,
        device: torch.device,
    ) -> None:
        super().__init__([model], batch)
        self._loss_fn = loss_fn
        self._device = device

    @property
    def samples(self) -> int:
        first = next(tensors_of(self.batch), None)
        return len(first) if first is not None and first.dim() else 1

    def _pass(self, scale: float, after_backward: Callable[[torch.Tensor], None]) -> None:
        with torch.autocast(self._device.type, dtype=torch.float16):
            loss = self._loss_fn(own_copy(self.batch))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise LossScaleError(
                f"loss_fn returned {_described(loss)}; allowed: the loss, a tensor of one element "
                "that depends on the model's parameters"
            )
        scaled = torch.amp.GradScaler(self._device.type, init_scale=scale).scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        after_backward(scaled)


@dataclass(frozen=True)
class OneProcess:
    """A `Place` with a single process."""

    models: Sequence[nn.Module]
    distributed: Any = field(default_factory=core.DummyDistributedContext)


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(model.parameters(), None)
    if first is None:
        raise LossScaleError("model: has no parameters; allowed: one that can be trained")
    return first.device


def _to_device(batch: Any, device: torch.device) -> Any:
    # Batches from Hugging Face tokenizers are not dicts, but have a `to` method.
    return batch.to(device) if hasattr(batch, "to") else pytorch.to_device(batch, device)


def _described(loss: object) -> str:
    if isinstance(loss, torch.Tensor):
        detached = "" if loss.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(loss.shape)}{detached}"
    return f"a {type(loss).__name__}"
