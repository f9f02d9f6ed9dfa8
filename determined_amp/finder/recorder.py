"""Records the magnitudes of the 16-bit tensors of a backward, without keeping the tensors.

In float16, activation gradients, and weight gradients before their cast to float32, can overflow or
be flushed to 0. `.grad` itself is float32 and does not show a flush. So the recorder hooks into
torch's dispatch, which sees every tensor.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from determined_amp.finder.histogram import Histogram, exponent_counts

# The `Source.module` of tensors that no module made, usually those of the loss.
OUTSIDE = "(outside the model)"
WHOLE_MODEL = "(the model)"

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
# Operations that return uninitialised memory.
_UNINITIALISED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


class Source(NamedTuple):
    """The origin of a tensor in a backward, the same for all steps of a recurrent network.

    Args:
        module: Name of the module.
        operation: Name of torch's operation.
        output: Index of the tensor among the operation's outputs.
        shape: Shape of the tensor, which tells activations from weights.
    """

    module: str
    operation: str
    output: int
    shape: tuple[int, ...]


class BackwardRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the 16-bit values of backwards by magnitude, module and operation.

    The counts stay on the device until `histograms` is called. The recorder skips the forwards that
    activation checkpointing repeats during the backward. It does not see sums inside a kernel, such
    as those of fused attention, or the buckets of DistributedDataParallel.

    Args:
        models: The models whose modules name the sources.

    Attributes:
        dtypes: The 16-bit dtypes of the recorded tensors.
    """

    supports_higher_order_operators = True

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origin = _Origin(models)
        self._counts: dict[Source, torch.Tensor] = {}
        self._largest: dict[Source, torch.Tensor] = {}
        self.dtypes: set[torch.dtype] = set()

    @contextmanager
    def recording(self) -> Iterator[BackwardRecorder]:
        """Record the backwards of all forwards that start inside this block."""
        with self._origin.tracking(), self:
            yield self

    def histograms(self) -> dict[Source, Histogram]:
        """Histograms by source, in the order of the backward; synchronises."""
        if not self._counts:
            return {}
        counts = torch.stack(list(self._counts.values())).cpu().numpy()
        return {source: Histogram(row) for source, row in zip(self._counts, counts, strict=True)}

    def largest(self) -> float:
        """The largest recorded magnitude, 0 if nothing was recorded; synchronises."""
        if not self._largest:
            return 0.0
        return float(torch.stack(list(self._largest.values())).max())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        if node is not None and self._is_backward(func):
            self._record(self._origin.of(node), str(func), result)
        return result

    def _is_backward(self, func: Any) -> bool:
        """Whether `func` belongs to a backward, not a repeated forward, and makes new values."""
        if torch.is_grad_enabled() or self._origin.in_forward:
            return False
        if not isinstance(func, torch._ops.OpOverload):
            return True  # a higher-order operator, such as flex_attention
        return func.overloadpacket not in _UNINITIALISED and not _only_views(func)

    def _record(self, module: str, operation: str, result: Any) -> None:
        for number, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _SIXTEEN_BIT:
                continue
            if not tensor.numel():
                continue
            self.dtypes.add(tensor.dtype)
            source = Source(module, operation, number, tuple(tensor.shape))
            counts, largest = exponent_counts(tensor), tensor.abs().max().float()
            if source in self._counts:
                self._counts[source] += counts
                torch.maximum(self._largest[source], largest, out=self._largest[source])
            else:
                self._counts[source], self._largest[source] = counts, largest


def _only_views(func: Any) -> bool:
    """Whether every result is a view of an input: its values are counted already."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


class _Origin:
    """Finds the module whose forward made a node of the autograd graph.

    Autograd numbers its nodes in the order of creation. So the numbers at which the forward of each
    module begins and ends tell which module made a node.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._names = _module_names(models)
        self._starts: list[int] = [0]
        self._modules: list[str] = [OUTSIDE]
        self._entered: defaultdict[int, list[str]] = defaultdict(list)  # by thread
        self._thread = threading.get_ident()
        self._probe = torch.zeros((), requires_grad=True)

    @property
    def in_forward(self) -> bool:
        """Whether this thread is in a module's forward; during a backward, a repeated forward."""
        return bool(self._entered[threading.get_ident()])

    @contextmanager
    def tracking(self) -> Iterator[None]:
        """Record when the forwards of modules begin and end inside this block."""
        with ExitStack() as stack:
            for module, name in self._names.items():
                before = module.register_forward_pre_hook(self._enter(name))
                after = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    def of(self, node: Any) -> str:
        return self._modules[bisect_right(self._starts, node._sequence_nr()) - 1]

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._entered[threading.get_ident()].append(name)
            self._mark(name)

        return hook

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        entered = self._entered[threading.get_ident()]
        entered.pop()
        self._mark(entered[-1] if entered else OUTSIDE)

    def _mark(self, name: str) -> None:
        # Each thread numbers its own nodes. Checkpointing makes nodes on another thread, and their
        # numbers mean nothing here.
        if torch.is_grad_enabled() and threading.get_ident() == self._thread:
            with torch._C._DisableTorchDispatch():
                number = self._probe.clone().grad_fn._sequence_nr()  # type: ignore[union-attr]
            self._starts.append(number)
            self._modules.append(name)


def _module_names(models: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Names of all modules, prefixed with the model's number if there are several models."""
    names: dict[nn.Module, str] = {}
    for number, model in enumerate(models):
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        prefix = f"model {number}: " if len(models) > 1 else ""
        for name, module in inner.named_modules():
            names.setdefault(module, prefix + (name or WHOLE_MODEL))
    return names
