"""Helpers for the tensors of a training: batches, parameters and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, in order."""
    found, waiting = [], [value]
    # A recursion would cost a call per item, and this runs on every batch.
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            waiting.extend(reversed(item))
        elif isinstance(item, (dict, Mapping)):
            waiting.extend(reversed([*item.values()]))
    return found


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every item of nested lists, tuples and dicts.

    A container of another class, such as a namedtuple, is passed to the function whole.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([mapped(item, function) for item in value])
    if kind is dict:
        return {key: mapped(item, function) for key, item in value.items()}
    return function(value)


def own_copy(batch: Any, *, shared: bool = False) -> Any:
    """Copy a batch, so that a trial may take it apart and change it in place.

    Args:
        batch: Tensors in any containers. A container that cannot be copied is returned
            itself.
        shared: Whether to copy only the containers, and share the tensors.
    """
    return mapped(batch, partial(_own_item, shared=shared))


def _own_item(item: Any, *, shared: bool) -> Any:
    if isinstance(item, torch.Tensor):
        # torch's deepcopy of a view would copy the whole memory behind the view.
        return (
            item if shared else item.detach().clone().requires_grad_(item.requires_grad)
        )
    try:
        if shared:
            return copy.copy(item)
        known = {id(tensor): own_copy(tensor) for tensor in tensors_of(item)}
        return copy.deepcopy(item, known)
    except Exception:  # copying runs the item's own code, which can raise anything
        return item


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer."""
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]


def parameters_in(
    models: Iterable[nn.Module], optimizers: Iterable[Optimizer] = ()
) -> list[torch.Tensor]:
    """All parameters of models and optimizers, without repetition."""
    of_models = (parameter for model in models for parameter in model.parameters())
    others = (
        parameter for optimizer in optimizers for parameter in parameters_of(optimizer)
    )
    return list(dict.fromkeys([*of_models, *others]))


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The closure in the arguments of `Optimizer.step`; None if there is none."""
    return args[0] if args else kwargs.get("closure")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as `float16`."""
    return str(dtype).removeprefix("torch.")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that `DistributedDataParallel` holds, or the model itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def numbered(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Each unwrapped model with the prefix of its names: `model 0: ` if several."""
    for number, model in enumerate(models):
        yield f"model {number}: " if len(models) > 1 else "", unwrapped(model)


def named_parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with their names, which are prefixed as `numbered` says."""
    for prefix, model in numbered(models):
        for name, parameter in model.named_parameters():
            yield prefix + name, parameter


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided and not empty, so that its rows can be read."""
    is_strided = tensor.layout is torch.strided and not (
        tensor.is_nested or tensor.is_quantized
    )
    return is_strided and tensor.numel() > 0


def is_fake_tensor(value: Any) -> bool:
    """Whether a value stands for a tensor, as the fake tensors of a compiler do."""
    dispatch = torch.Tensor.__torch_dispatch__
    return getattr(type(value), "__torch_dispatch__", dispatch) is not dispatch


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite; synchronises."""
    return bool(torch.isfinite(values_of(tensor)).all())


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be read.

    Tensors inside `torch.func`, or with a freed storage, cannot.
    """
    try:
        begin = tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return begin != 0 or not tensor.numel()


def is_not_finite(value: Any) -> bool:
    """Whether a value is a number, but not a finite one."""
    try:
        return value is not None and not math.isfinite(value)
    except TypeError:  # not a number
        return False


def has_nan(tensor: torch.Tensor) -> bool:
    """Whether a number of a tensor is NaN; synchronises."""
    return bool(torch.isnan(values_of(tensor)).any())


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense, sparse or nested tensor."""
    if tensor.is_nested:
        return torch.cat([part.detach().flatten() for part in tensor.unbind()])
    return tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()


def largest_of(tensor: torch.Tensor) -> float:
    """The largest magnitude in a tensor, 0 if it is empty; synchronises."""
    return float(values_of(tensor).abs().max()) if tensor.numel() else 0.0
