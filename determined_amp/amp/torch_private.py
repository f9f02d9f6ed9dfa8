"""The private names of torch that the library uses.

Other files use `torch._foreach_*`, and `_saved_*` of autograd nodes, which torch
documents, but no other private name. torch offers no public way to do what is done
here. To support another version of torch, review this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
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

# The operation that copies the number of a tensor to the host.
READ = torch.ops.aten._local_scalar_dense.default

# Where to find the function that casts the arguments of a `custom_fwd`.
CASTS_OF_AUTOCAST: tuple[Any, str] = (torch.amp.autocast_mode, "_cast")

# The key of a `GradScaler`'s state for its count of applied steps in a row.
GROWTH_TRACKER = "_growth_tracker"

# Where to find the function that registers the hooks of autograd nodes.
NODE_HOOKS: tuple[Any, str] = (torch.autograd.Function, "_register_hook")


# How often a tensor was changed in place, without changes through `.data`.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# Whether the schema of an operation says that it writes into its arguments.
is_in_place: Callable[[Any], bool] = attrgetter("_schema.is_mutable")

# What a `GradScaler` knows of each optimizer since the last update, by its id.
states_of_steps: Callable[[Any], Any] = attrgetter("_per_optimizer_states")


def is_compiled(model: nn.Module) -> bool:
    """Whether the user compiled it: `torch.compile(model)` or `model.compile()`."""
    return (
        type(model).__name__ == "OptimizedModule"
        or model._compiled_call_impl is not None
    )


# Backwards.


@contextmanager
def backwards_through(run: Callable[..., Any]) -> Iterator[None]:
    """Call a function in place of every backward of torch in this block.

    Args:
        run: Called with the engine's `run_backward` and its arguments. The outputs come
            first. `accumulate_grad` is false for `torch.autograd.grad`.
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


def reads_found_inf(optimizer: Any) -> bool:
    """Whether an optimizer reads `found_inf` on the device, as torch's fused ones do.

    `GradScaler.step` then calls it even for a skip, and does not wait for the device.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def give_found_inf(optimizer: Any) -> None:
    """Let `GradScaler.step` pass `found_inf` to a fused optimizer, which then skips."""
    optimizer._step_supports_amp_scaling = True


# Clips.

# torch exports no private name of this module, so mypy must not check it.
_module: Any = clip_grad
group_gradients: Callable[..., Any] = _module._group_tensors_by_device_and_dtype


def group_gradients_by(function: Callable[..., Any]) -> None:
    """Let torch's clip functions group their gradients by this function."""
    _module._group_tensors_by_device_and_dtype = function
