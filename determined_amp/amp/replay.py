"""Trains a batch again without a step, and restores all state."""

from __future__ import annotations

import copy
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from determined_amp.amp.casts import drop_casts
from determined_amp.amp.compiled import as_written
from determined_amp.amp.patched import patched
from determined_amp.amp.tensors import parameters_in, tensors_of

_NEVER_COPIED = (Dataset, DataLoader, types.MethodType)


def own_copy(batch: Any, *, shared: bool = False) -> Any:
    """A copy of a batch, which a trial may take apart and change in place.

    Args:
        batch: Tensors in any containers. A container that cannot be copied is returned itself.
        shared: Whether to copy the containers only, and share the tensors.
    """
    if isinstance(batch, torch.Tensor):
        # torch's own deepcopy of a view copies all of the memory that the view is a part of.
        return batch if shared else batch.detach().clone().requires_grad_(batch.requires_grad)
    kind = type(batch)
    if kind is list or kind is tuple:
        return kind([own_copy(item, shared=shared) for item in batch])
    if kind is dict:
        return {key: own_copy(item, shared=shared) for key, item in batch.items()}
    try:
        if shared:
            return copy.copy(batch)
        known = {id(tensor): own_copy(tensor) for tensor in tensors_of(batch)}
        return copy.deepcopy(batch, known)
    except Exception:  # copying runs code of the batch's own, which can raise anything
        return batch


class NewestBatch:
    """Trains batches, and keeps the newest one so that it can be trained again.

    A training may take its batch apart and change tensors in place. Tensors are costly to copy, so
    those of later batches are copied only if it has changed a tensor before.

    Args:
        train: Called with `batch=` and its indices by name.

    Attributes:
        batch: The newest batch as the training got it; None before the first.
    """

    def __init__(self, train: Callable[..., Any]) -> None:
        self.batch: Any = None
        self._train = train
        self._indices: dict[str, int] = {}
        self._changes_batches: bool | None = None  # not known before the first one

    def train(self, batch: Any, **indices: int) -> Any:
        """Train a batch, and return what the training returns."""
        self.batch = own_copy(batch, shared=self._changes_batches is False)
        self._indices = indices
        tensors = [tensor for tensor in tensors_of(batch) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        result = self._train(batch=batch, **indices)
        has_changed = versions != [tensor._version for tensor in tensors]
        self._changes_batches = has_changed or bool(self._changes_batches)
        return result

    def train_again(self) -> None:
        """Train a copy of the newest batch with the same indices."""
        self._train(batch=own_copy(self.batch), **self._indices)


@contextmanager
def without_steps(
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    others: Iterable[tuple[object, str]] = (),
    *,
    scale: float | None = None,
) -> Iterator[None]:
    """Let no step, zero_grad or unscale_ have any effect in this block.

    Args:
        scaler: The scaler; its scale is restored.
        optimizers: The optimizers that do nothing.
        others: Other objects, each with the name of a method that does nothing either.
        scale: The loss scale in this block; by default the current one.
    """
    still: list[tuple[object, str]] = [(scaler, name) for name in ("step", "update", "unscale_")]
    still += [(optimizer, name) for optimizer in optimizers for name in ("step", "zero_grad")]
    with ExitStack() as stack:
        for owner, name in (*still, *others):
            stack.enter_context(patched(owner, name, _do_nothing))
        if scale is not None and scaler.is_enabled():
            before = scaler.state_dict()
            stack.callback(scaler.load_state_dict, before)
            scaler.load_state_dict({**before, "scale": scale})
        yield


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextmanager
def undisturbed(
    *models: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> Iterator[None]:
    """Train a batch in this block, then restore all state.

    Gradients are enabled and the models are in training mode, even during a validation. Weights
    (some trials clip or average them themselves), gradients, buffers, modes, settings of the
    optimizers and random state are restored. DistributedDataParallel exchanges nothing.
    """
    parameters = {p: p.grad for p in parameters_in(models, optimizers)}
    weights = [(p, p.detach().clone()) for p in parameters if not is_lazy(p)]
    owned = [  # TorchScript's modules keep their own
        (module, dict(module._buffers))
        for model in models
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    buffers = {b: b.clone() for model in models for b in model.buffers()}
    modes = {module: module.training for model in models for module in model.modules()}
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    pythons = random.getstate()
    numpy: Any = sys.modules.get("numpy")  # a batch that draws from it has imported it
    numpys = numpy.random.get_state() if numpy else None
    with ExitStack() as stack:
        stack.enter_context(_settings_kept(optimizers))
        stack.enter_context(as_written())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        for model in models:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())
            if not model.training:
                model.train()
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in parameters.items():
                parameter.grad = gradient
            for weight, before in weights:
                weight.data.copy_(before)
            drop_casts()
            for module, training in modes.items():
                module.training = training
            for module, own in owned:  # a module may have put others in their place
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, before in buffers.items():
                    if not _same(buffer, before):
                        buffer.copy_(before)
            random.setstate(pythons)
            if numpy:
                numpy.random.set_state(numpys)


@contextmanager
def attributes_apart(owner: object, shared: Iterable[object]) -> Iterator[None]:
    """Give an object copies of its attributes in this block, and its own attributes after it.

    So a counter or a queue that it keeps does not see a batch that is trained in the block.

    Args:
        owner: Whose attributes are copied, such as a trial.
        shared: Objects that are not copied, wherever they are met. Neither are data sets, methods,
            and what cannot be copied.
    """
    attributes = vars(owner)
    own = dict(attributes)
    memo = {id(each): each for each in (owner, *shared)}
    for name, value in own.items():
        if not isinstance(value, _NEVER_COPIED):
            with suppress(Exception):  # copying runs code of the attribute's own
                attributes[name] = copy.deepcopy(value, memo)
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(own)


@contextmanager
def _settings_kept(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    before = [dict(group) for group in groups]
    try:
        yield
    finally:
        for group, settings in zip(groups, before, strict=True):
            group.update(settings)


def _same(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether there is nothing to restore, or the buffer is not strided and cannot be restored."""
    return buffer.layout is not torch.strided or torch.equal(buffer, before)


@contextmanager
def float16_as(dtype: torch.dtype | None, *, bfloat16_too: bool = False) -> Iterator[None]:
    """Make every float16 autocast region compute in `dtype`, or in float32 for None.

    Args:
        dtype: What float16 regions compute in.
        bfloat16_too: Whether this applies to bfloat16 regions, too.
    """
    replaced = (torch.float16, torch.bfloat16) if bfloat16_too else (torch.float16,)
    enter = torch.autocast.__enter__

    def enter_as(region: torch.autocast) -> Any:
        before = region.fast_dtype, region._enabled
        if region._enabled and region.fast_dtype in replaced:
            region.fast_dtype, region._enabled = dtype or region.fast_dtype, dtype is not None
        try:
            return enter(region)  # type: ignore[no-untyped-call]  # torch has no types here
        finally:
            region.fast_dtype, region._enabled = before

    with patched(torch.autocast, "__enter__", enter_as):
        yield
