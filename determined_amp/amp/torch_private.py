"""All private names of torch that the library uses, but for `torch._foreach_*`, and
`_saved_*` of the nodes of a graph, which torch documents.

torch offers no public way to do what is done here. To support another version of torch
is to review this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode

from determined_amp.amp.patched import patched

__all__ = [
    "CAST",
    "CASTS_OF_AUTOCAST",
    "GROWTH_TRACKER",
    "NODE_HOOKS",
    "READ",
    "TorchDispatchMode",
]

# The operation that casts a tensor.
CAST = torch.ops.aten._to_copy

# The operation that reads the number of a tensor.
READ = torch.ops.aten._local_scalar_dense.default

# Casts each argument of a function that autocast treats.
CASTS_OF_AUTOCAST: tuple[Any, str] = (torch.amp.autocast_mode, "_cast")

# What a `GradScaler` counts its applied steps by, in its state.
GROWTH_TRACKER = "_growth_tracker"

# Registers each hook of a node of the autograd graph.
NODE_HOOKS: tuple[Any, str] = (torch.autograd.Function, "_register_hook")


# How often a tensor has been changed in place, but for changes through `.data`.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# Whether an operation of a dispatch mode writes into its arguments, as it says itself.
is_in_place: Callable[[Any], bool] = attrgetter("_schema.is_mutable")

# What a `GradScaler` knows of each optimizer, by its id, until its next update.
states_of_steps: Callable[[Any], Any] = attrgetter("_per_optimizer_states")


# How many nodes of autograd graphs a thread had made when it made this one.
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")


def is_compiled(model: nn.Module) -> bool:
    """Whether the user has compiled it, with `torch.compile(model)` or
    `model.compile()`.
    """
    return (
        type(model).__name__ == "OptimizedModule"
        or model._compiled_call_impl is not None
    )


# Backwards.


@contextmanager
def backwards_through(run: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of every backward of torch in this block.

    Args:
        run: Gets the engine's `run_backward` and its arguments: the outputs first, and
            `accumulate_grad`, which is false for `torch.autograd.grad`.
    """
    engine = _Engine(torch.autograd.Variable._execution_engine, run)
    with patched(torch.autograd.Variable, "_execution_engine", engine):
        yield


class _Engine:
    """torch's autograd engine with another `run_backward`.

    Args:
        engine: torch's own engine.
        run_backward: Called with the engine's own `run_backward` as its first argument.
    """

    def __init__(self, engine: Any, run_backward: Callable[..., Any]) -> None:
        self._engine = engine
        self.run_backward = partial(run_backward, engine.run_backward)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


# Loss scales.


# The scale of an enabled `GradScaler`, (), float32; None before it has scaled a loss.
scale_in: Callable[[Any], Any] = attrgetter("_scale")


def scale_tensor(scaler: Any) -> Any:
    """The scale of a `GradScaler` itself, (), float32; None before it has scaled a
    loss.
    """
    return scale_in(scaler) if scaler.is_enabled() else None


def give_found_inf(optimizer: Any) -> None:
    """Let `GradScaler.step` leave it to a fused optimizer whether its step is
    skipped.
    """
    optimizer._step_supports_amp_scaling = True


# Clips.

# torch exports no name of this module.
_module: Any = clip_grad
sort_gradients: Callable[..., Any] = _module._group_tensors_by_device_and_dtype


def sort_gradients_by(function: Callable[..., Any]) -> None:
    """Let torch's clips sort their gradients by another function than
    `sort_gradients`.
    """
    _module._group_tensors_by_device_and_dtype = function
