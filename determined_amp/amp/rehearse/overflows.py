"""Searches all results of a rehearsal for the first one that is not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from determined_amp.amp.rehearse.backward_graph import (
    BackwardGraph,
    Gradients,
    module_names,
)
from determined_amp.amp.tensors import (
    has_nan,
    has_numbers,
    is_finite,
    largest_of,
    tensors_of,
)
from determined_amp.amp.torch_private import CAST, TorchDispatchMode

# These make masks, which may be -inf. What is computed from a mask is judged later.
_MASKS = {
    "fill",
    "fill_",
    "full_like",
    "index_fill",
    "index_fill_",
    "masked_fill",
    "masked_fill_",
}
_UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided"}

_MOST_PLACES = 16

# A module, an operation, and how often the module has called that operation before.
Key = tuple[str, str, int]


class Place(NamedTuple):
    """An operation of a forward whose inputs are finite and whose result is not.

    Args:
        key: Identifies the operation, equal in every rehearsal.
        between: For an operation between modules, the module whose forward ended last.
        cast_of: For a cast, the largest value that was cast.
        kind: What overflowed: "weight" if a parameter was cast, else "activation".
        dtype: The dtype of its result.
    """

    key: Key
    between: str | None
    cast_of: float | None
    kind: str
    dtype: torch.dtype

    @property
    def module(self) -> str:
        return self.key[0]


class OverflowWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Looks at every result of a rehearsal; synchronises often.

    Args:
        models: The models whose modules name the places.
        asked: Operations whose largest result is recorded.

    Attributes:
        forward: The first places of the forward.
        backward: The module of the first backward node that makes gradients that are
            not finite from finite ones.
        largest: The largest magnitude of each recorded operation.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        models: Sequence[nn.Module],
        asked: Collection[Key] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward: list[Place] = []
        self.backward: str | None = None
        self.largest: dict[Key, float] = {}
        self._asked = asked
        self._graph = BackwardGraph(models, self._look_at_node)
        self._leaves = {
            n for m, n in module_names(models).items() if not list(m.children())
        }
        self._calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at everything that is computed in this block."""
        with self._graph.watching(), self:
            yield

    def _look_at_node(
        self, module: str, operation: str, made: Gradients, taken: Gradients
    ) -> None:
        if self.backward is None and _are_finite(taken) and not _are_finite(made):
            self.backward = module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # A backward is watched by node. A checkpoint only repeats its forward there.
        if not self._graph.in_backward:
            self._look_at_result(func, result, (args, kwargs or {}))
        return result

    def _look_at_result(self, func: Any, result: Any, arguments: Any) -> None:
        operation = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        made = [each for each in tensors_of(result) if each.is_floating_point()]
        results = [each for each in made if has_numbers(each)]
        if results and operation not in _UNINITIALISED:
            self._look_at(operation, results, arguments)

    def _look_at(
        self, operation: str, results: list[torch.Tensor], arguments: Any
    ) -> None:
        module = self._graph.current
        key = module, operation, self._calls[module, operation]
        is_cast = operation == CAST.__name__
        if not is_cast:  # casts differ between the precisions
            self._calls[module, operation] += 1
            if key in self._asked:
                self.largest[key] = max(map(largest_of, results))
        if (
            _are_finite(results)
            or operation in _MASKS
            or len(self.forward) == _MOST_PLACES
        ):
            return
        inputs = [
            tensor for tensor in tensors_of(arguments) if tensor.is_floating_point()
        ]
        # A new NaN counts even if the inputs are not finite: a softmax over -inf alone
        # gives NaN.
        makes_nan = any(map(has_nan, results)) and not any(map(has_nan, inputs))
        if inputs and (makes_nan or _are_finite(inputs)):
            cast_of = max(map(largest_of, inputs)) if is_cast else None
            between = None if module in self._leaves else self._graph.left
            kind = (
                "weight"
                if is_cast and isinstance(inputs[0], nn.Parameter)
                else "activation"
            )
            self.forward.append(Place(key, between, cast_of, kind, results[0].dtype))


def _are_finite(tensors: Gradients) -> bool:
    return all(tensor is None or is_finite(tensor) for tensor in tensors)
