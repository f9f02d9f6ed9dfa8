"""Leaves steps out of a rehearsal, and restores all state after it."""

from __future__ import annotations

import copy
import logging
import random
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from determined_amp.amp.casts import drop_casts
from determined_amp.amp.compiled import as_written
from determined_amp.amp.patched import do_nothing, patched
from determined_amp.amp.tensors import parameters_in

logger = logging.getLogger(__name__)

# What torch itself keeps in a module, such as its hooks. These attributes stay.
_OF_TORCH = frozenset(vars(nn.Module()))

_NEVER_COPIED = (Dataset, DataLoader, types.MethodType)


@contextmanager
def without_steps(
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[Optimizer],
    others: Iterable[tuple[object, str]] = (),
    *,
    scale: float | None = None,
) -> Iterator[None]:
    """Let no step, zero_grad, unscale_ or update have any effect in this block.

    Args:
        scaler: The scaler; its scale is restored.
        optimizers: The optimizers that must not step.
        others: Other objects, each with the name of a method that must do nothing.
        scale: The loss scale in this block; by default the current one.
    """
    still: list[tuple[object, str]] = [
        (scaler, name) for name in ("step", "update", "unscale_")
    ]
    still += [
        (optimizer, name) for optimizer in optimizers for name in ("step", "zero_grad")
    ]
    with ExitStack() as stack:
        for owner, name in (*still, *others):
            stack.enter_context(patched(owner, name, do_nothing))
        if scale is not None and scaler.is_enabled():
            before = scaler.state_dict()
            stack.callback(scaler.load_state_dict, before)
            scaler.load_state_dict({**before, "scale": scale})
        yield


@contextmanager
def undisturbed(
    *models: nn.Module, optimizers: Sequence[Optimizer] = ()
) -> Iterator[None]:
    """Train a batch in this block, then restore all state.

    Gradients are enabled and the models are in training mode, even during a validation.
    Weights (some trials clip or average them themselves), gradients, buffers, modes,
    settings of the optimizers and random state are restored. DistributedDataParallel
    exchanges nothing.
    """
    parameters = parameters_in(models, optimizers)
    modules = [module for model in models for module in model.modules()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    with ExitStack() as stack:
        _keep_random_state(stack, parameters)
        for model in models:
            for buffer in model.buffers():
                stack.callback(_put_back, buffer, buffer.clone())
        for module in modules:
            stack.callback(setattr, module, "training", module.training)
            # A script keeps its own values. A lazy module must keep sizes it learns.
            if not isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin)):
                kept = _attributes(module), _own_buffers(module), dir(module)
                stack.callback(_put_back_attributes, module, *kept)
        _keep_weights(stack, parameters)
        for group in groups:
            stack.callback(group.update, dict(group))
        stack.enter_context(as_written())
        stack.enter_context(torch.enable_grad())
        for model in models:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                stack.enter_context(model.no_sync())
            if not model.training:
                model.train()
        yield


def _keep_random_state(stack: ExitStack, parameters: Sequence[torch.Tensor]) -> None:
    devices = {
        parameter.device for parameter in parameters if parameter.device.type == "cuda"
    }
    stack.enter_context(torch.random.fork_rng(devices=list(devices)))
    stack.callback(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy")  # imported by whatever draws from it
    if numpy:
        stack.callback(numpy.random.set_state, numpy.random.get_state())


def _keep_weights(stack: ExitStack, parameters: Sequence[torch.Tensor]) -> None:
    """Restore weights and gradients when the stack closes; remove gradients now."""
    stack.callback(drop_casts)
    for parameter in parameters:
        if not is_lazy(parameter):
            stack.callback(_put_back, parameter, parameter.detach().clone())
        stack.callback(setattr, parameter, "grad", parameter.grad)
        parameter.grad = None


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    # A tensor that is not strided cannot be restored.
    if tensor.layout is torch.strided and not torch.equal(tensor, before):
        tensor.data.copy_(before)


def _put_back_attributes(
    module: nn.Module,
    attributes: dict[str, Any],
    buffers: dict[str, torch.Tensor],
    names: Sequence[str],
) -> None:
    """Restore a module's attributes, and buffers that its forward has replaced."""
    for name in _attributes(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    # Including buffers that were None before, but not buffers that are new.
    for name in {*buffers, *_own_buffers(module)}.intersection(names):
        setattr(module, name, buffers.get(name))


def _own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's own code keeps, such as a count of its forwards."""
    return {name: v for name, v in vars(module).items() if name not in _OF_TORCH}


@contextmanager
def attributes_apart(owner: object, shared: Iterable[object]) -> Iterator[None]:
    """Give an object copies of its attributes in this block, and restore them after it.

    So its counters and queues do not see a batch that is trained in the block.

    Args:
        owner: The object, such as a trial.
        shared: Objects that are never copied, wherever they occur. Data sets, loaders,
            methods and what cannot be copied are not copied either.
    """
    attributes = vars(owner)
    own = dict(attributes)
    memo = {id(each): each for each in (owner, *shared)}
    moves_on = []
    for name, value in own.items():
        if not isinstance(value, _NEVER_COPIED):
            try:
                attributes[name] = copy.deepcopy(value, memo)
            except Exception:  # copying runs the attribute's own code
                if isinstance(value, (Iterator, torch.Generator)):
                    moves_on.append(name)
    if moves_on:
        logger.warning(
            "the audit trains the first batch once more, on copies of what the trial "
            "keeps; it cannot copy %s, which the training finds as that batch has left "
            "it; amp.audit: false trains without an audit",
            ", ".join(moves_on),
        )
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(own)
