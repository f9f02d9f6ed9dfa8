"""Records the 16-bit tensors that a backward makes, one by one, without keeping them.

What overflows or is flushed to 0 in float16 are the gradients of activations and the casts of
weight gradients on their way to float32. `.grad` itself is float32 and shows a flush too late, so
this looks at dispatch, where every tensor passes by.
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

# Where the loss is computed, as a rule.
OUTSIDE = "(outside the model)"
WHOLE_MODEL = "(the model)"

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
# Their values are whatever was in memory before.
_UNINITIALISED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}


class Source(NamedTuple):
    """What made a tensor in a backward; the steps of a recurrent network have it in common.

    Args:
        module: Whose backward it was.
        operation: Of torch.
        output: Which one of the operation's.
        shape: Tells activations from weights.
    """

    module: str
    operation: str
    output: int
    shape: tuple[int, ...]


class BackwardRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Histograms of the 16-bit tensors made in backwards, by module and operation.

    The values stay on the device until `histograms`; `dtypes` are those seen. What a checkpointed
    forward computes again during the backward is left out. Sums inside a kernel, such as those of
    fused attention, and the buckets of DistributedDataParallel are not seen.
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
        """Record the backwards of forwards that begin in here."""
        with self._origin.listening(), self:
            yield self

    def histograms(self) -> dict[Source, Histogram]:
        """In the order of the backward; synchronises."""
        if not self._counts:
            return {}
        counts = torch.stack(list(self._counts.values())).cpu().numpy()
        return {source: Histogram(row) for source, row in zip(self._counts, counts, strict=True)}

    def largest(self) -> float:
        """The largest magnitude recorded, 0 if there is none; synchronises."""
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
        """Whether autograd computes here, not a module again, and new values come out."""
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
    """Whether all that it returns is an input's memory in another shape, seen before."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(a is not None and not a.is_write for a in aliases)


class _Origin:
    """Knows in which module's forward a node of the autograd graph was made.

    Autograd numbers its nodes as they are made. So the numbers at which modules are entered and
    left tell the module of any node, whatever function made it.
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
        """Whether this thread is in a module's forward: in a backward, computing it again."""
        return bool(self._entered[threading.get_ident()])

    @contextmanager
    def listening(self) -> Iterator[None]:
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
        # Each thread numbers its own nodes; those made on another one, by checkpointing, never run.
        if torch.is_grad_enabled() and threading.get_ident() == self._thread:
            with torch._C._DisableTorchDispatch():
                number = self._probe.clone().grad_fn._sequence_nr()  # type: ignore[union-attr]
            self._starts.append(number)
            self._modules.append(name)


def _module_names(models: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Plain names; several models are told apart by their number."""
    names: dict[nn.Module, str] = {}
    for number, model in enumerate(models):
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        prefix = f"model {number}: " if len(models) > 1 else ""
        for name, module in inner.named_modules():
            names.setdefault(module, prefix + (name or WHOLE_MODEL))
    return names
