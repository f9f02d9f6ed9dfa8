"""Finds the initial loss scale from a model, its loss and batches, without a trial."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from determined_amp.amp.fp32_modules import items_of, with_items
from determined_amp.amp.loop import AmpLoop
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.amp.slots import OneSlot
from determined_amp.amp.tensors import tensors_of
from determined_amp.finder.found_scale import FoundScale, run_now
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_finding import find_range
from determined_amp.finder.scale_score import DEFAULT_LOG2


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
        model: The model, with float32 parameters, on its device. It runs in training
            mode.
        loss_fn: Runs the forward of a batch and returns the loss. It is called under
            autocast and must not call backward. If training accumulates gradients, it
            must divide the loss as training does.
        batches: Training batches of the usual batch size; four are enough. Tensors in
            tuples, lists, dicts and dataclasses are moved to the device.
        device: The model's device; by default the device of its first parameter.
        init_scale: The initial loss scale that training uses now.

    Raises:
        ConfigError: if `loss_fn` returns no loss.
        LossScaleError: if another argument is wrong, or no loss scale can be found.
    """
    if not (init_scale > 0 and math.isfinite(init_scale)):
        raise LossScaleError(
            f"init_scale: got {init_scale}; allowed: more than 0, and finite"
        )
    where = _device(model, device)
    moved = _moved(batches, where)
    rehearsals = rehearsals_of(model, loss_fn, moved, where)
    counts = {"batches": len(moved), "samples": sum(map(_samples, moved))}
    finding = find_range(rehearsals, OneSlot())
    run = run_now(type(model).__name__, where, init_scale=init_scale, **counts)
    return FoundScale(finding, run)


def rehearsals_of(
    model: nn.Module,
    loss_fn: Callable[[Any], torch.Tensor],
    batches: Iterable[Any],
    device: torch.device,
) -> list[Rehearsal]:
    """Make the rehearsals of batches for `find_loss_scale`."""
    settings = AmpSettings(Precision.AMP_FP16, set_backends=False)
    amp = AmpLoop(settings, device, slots=OneSlot())
    amp.models.append(model)  # not by `prepare`, which would change it
    return [amp.rehearsal(batch, loss_fn) for batch in batches]


def _moved(batches: Iterable[Any], device: torch.device) -> list[Any]:
    moved = [_to_device(batch, device) for batch in batches]
    if not moved:
        raise LossScaleError(
            "batches: got none; allowed: one batch or more, such as four"
        )
    return moved


def _samples(batch: Any) -> int:
    first = next(iter(tensors_of(batch)), None)
    return len(first) if first is not None and first.dim() else 1


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next(model.parameters(), None)
    if first is None:
        raise LossScaleError(
            "model: has no parameters; allowed: one that can be trained"
        )
    return first.device


def _to_device(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):  # a tensor, or a batch of Hugging Face's tokenizers
        return batch.to(device)
    items = {key: _to_device(item, device) for key, item in items_of(batch).items()}
    return with_items(batch, items) if items else batch
