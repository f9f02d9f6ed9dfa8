"""Records the magnitudes of the 16-bit tensors of a backward, without keeping the tensors.

In float16, activation gradients, and weight gradients before their cast to float32, can overflow or
be flushed to 0. `.grad` itself is float32 and does not show a flush. So the recorder hooks into
torch's dispatch, which sees every tensor.

Not every tensor of a backward is a gradient. The derivative of x^3 first computes the factor 3 x^2,
which no loss scale moves. What a loss scale moves is what depends on the seed: the gradient of the
loss with respect to itself, with which autograd begins. So the seed is marked, and every result of
an operation on marked values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from determined_amp.amp.origin import Origin, backwards_through, hooked, only_views
from determined_amp.amp.patched import patched
from determined_amp.amp.tensors import is_batched, parameters_in, tensors_of
from determined_amp.finder.histogram import Histogram, Tally

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten
# Operations whose results have the shape of an input, and not its values.
_NEW = {
    _aten.empty_like,
    _aten.full_like,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.new_full,
    _aten.new_ones,
    _aten.new_zeros,
    _aten.ones_like,
    _aten.rand_like,
    _aten.randn_like,
    _aten.sgn,
    _aten.sign,
    _aten.zeros_like,
}


class Source(NamedTuple):
    """The origin of a tensor in a backward, the same for all steps of a recurrent network."""

    module: str
    operation: str  # name of torch's operation
    output: int  # index of the tensor among the operation's outputs
    shape: tuple[int, ...]  # shape of the tensor, which tells activations from weights


class BackwardRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Counts the 16-bit values of backwards that a loss scale moves, by module and operation.

    Recorded is what depends on the seed of a backward and reaches a parameter: `GradScaler` does
    not see the gradients of inputs. The recorder does not see sums inside a kernel, such as those
    of fused attention, or the buckets of DistributedDataParallel.

    Args:
        models: Their modules name the sources, and their parameters are those to reach.
        optimizers: Those of the trial: so are parameters of theirs that are in no model.

    Attributes:
        histograms: Histograms by source, in the order of the backward.
        dtypes: The 16-bit dtypes of the recorded tensors.
    """

    supports_higher_order_operators = True

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters_in(models, optimizers)
        self._origin = Origin(models)
        self._main = self._flow = _Flow()
        self._flows = [self._flow]
        self._tally, self._recorded = Tally(), list[tuple[Source, int]]()
        self.histograms: dict[Source, Histogram] = {}
        self.dtypes: set[torch.dtype] = set()

    @contextmanager
    def recording(self) -> Iterator[BackwardRecorder]:
        """Record the backwards of all forwards that start inside this block; then synchronise."""
        self._main = self._flow = _Flow()
        self._flows, self._tally = [self._flow], Tally()
        self._recorded.clear()
        with self._origin.tracking(), self._following(), self:
            yield self
        self._keep()

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Follow each backward from its seed to the parameters.

        `torch.autograd.grad` is followed only for a scaled output. Without the scale, a gradient
        that is part of the loss is no more scaled than the rest of the forward.
        """
        scale, scaled = GradScaler.scale, _Flow()
        parameters = dict.fromkeys(self._parameters)

        def follow(run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad"):
                # Hooks cost more than a small backward. A trial may thaw a parameter in between.
                for parameter in [p for p in parameters if p.requires_grad]:
                    stack.enter_context(hooked([parameter], self._main.end))
                    del parameters[parameter]
                with hooked(_dense(outputs), self._flow.begin):
                    return run(outputs, *args, **kwargs)
            if not scaled.holds(outputs):
                return run(outputs, *args, **kwargs)
            # A flow of its own: the trial divides these gradients by the scale before it uses them.
            outer, self._flow = self._flow, _Flow()
            self._flows.append(self._flow)
            try:
                with hooked(_dense(outputs), self._flow.begin):
                    gradients = run(outputs, *args, **kwargs)
                self._flow.end(gradients)
            finally:
                self._flow = outer
            return gradients

        def noted_scale(scaler: GradScaler, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            scaled.begin(result)
            return result

        with ExitStack() as stack:
            stack.enter_context(backwards_through(follow))
            stack.enter_context(patched(GradScaler, "scale", noted_scale))
            yield

    def _keep(self) -> None:
        """Add what reached a parameter to the histograms, and forget the rest."""
        reached = set().union(*(flow.reached() for flow in self._flows))
        kept = [n for n, (_, storage) in enumerate(self._recorded) if storage in reached]
        for number, histogram in zip(kept, self._tally.histograms(kept), strict=True):
            source = self._recorded[number][0]
            before = self.histograms.get(source)
            self.histograms[source] = before + histogram if before else histogram

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._flow.has_begun or getattr(func, "overloadpacket", None) in _NEW:
            return result
        is_followed = self._flow.passes(args, kwargs, result)
        node: Any = torch._C._current_autograd_node()
        if is_followed and node is not None and not only_views(func):
            self._record(self._origin.of(node), str(func), result)
        return result

    def _record(self, module: str, operation: str, result: Any) -> None:
        for number, tensor in enumerate(result if isinstance(result, (tuple, list)) else (result,)):
            for values in _dense(tensor):
                if values.dtype in _SIXTEEN_BIT and values.numel():
                    self.dtypes.add(values.dtype)
                    shape = () if tensor.is_nested else tuple(tensor.shape)
                    source = Source(module, operation, number, shape)
                    self._recorded.append((source, _storage(values)))
                    parts = values.unbind() if values.is_nested else ()  # of different lengths
                    self._tally.add(torch.cat([p.flatten() for p in parts]) if parts else values)


class _Flow:
    """Where the values of a backward come from: which memory depends on which, from the seed on.

    Memory is followed, not tensors: a view and its base share it, and autograd hands on views as
    tensors of its own. A weak reference keeps the address of freed memory from being used again.
    """

    def __init__(self) -> None:
        self._sources: dict[int, set[int]] = {}  # of all memory that depends on a seed
        self._references: list[StorageWeakRef] = []
        self._ends: set[int] = set()

    def begin(self, seeds: Any) -> None:
        """Follow what is computed from the tensors in these nested values."""
        for tensor in _dense(seeds):
            self._follow(tensor)

    def end(self, gradients: Any) -> None:
        """Note the tensors in these nested values as the results of a backward."""
        self._ends.update(map(_storage, _dense(gradients)))

    def holds(self, values: Any) -> bool:
        """Whether a tensor in these nested values depends on a seed."""
        return any(_storage(tensor) in self._sources for tensor in _dense(values))

    @property
    def has_begun(self) -> bool:
        return bool(self._sources)

    def reached(self) -> set[int]:
        """The memory that an end depends on."""
        storages: set[int] = set()
        waiting = [*self._ends]
        while waiting:
            storage = waiting.pop()
            if storage not in storages:
                storages.add(storage)
                waiting.extend(self._sources.get(storage, ()))
        return storages

    def passes(self, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether an operation has an argument that depends on a seed; then its result does."""
        sources = self._sources.keys() & {_storage(t) for t in _dense((args, kwargs))}
        if sources:
            for tensor in _dense(result):
                if tensor.is_floating_point() or tensor.is_complex():  # others are no gradients
                    self._follow(tensor).update(sources)
        return bool(sources)

    def _follow(self, tensor: torch.Tensor) -> set[int]:
        storage = _storage(tensor)
        if storage not in self._sources:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch
            self._references.append(reference)
            self._sources[storage] = set()
        return self._sources[storage]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _dense(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested values; of a sparse one, its values."""
    for tensor in tensors_of(values):
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # by torch.func
            tensor = torch._C._functorch.get_unwrapped(tensor)  # noqa: PLW2901
        level = 1
        while is_batched(tensor):
            tensor = torch._remove_batch_dim(tensor, level, 1, 0)  # noqa: PLW2901
            level += 1
        if tensor.layout is torch.strided:
            yield tensor
        elif tensor.layout is torch.sparse_coo:
            yield tensor._values()
        elif tensor.layout is not torch._mkldnn:  # type: ignore[attr-defined]  # torch
            yield tensor.values()
