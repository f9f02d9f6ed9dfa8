"""Finds averages of weights, and sees whether a skipped step moves them."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from determined_amp.amp.tensors import is_stand_in
from determined_amp.check.finding import Where
from determined_amp.check.lines import users_line
from determined_amp.check.record import Record

# Elements of a tensor that is near a weight by no chance.
_LEAST = 16

# The cosine of what has one direction.
_NEAR = 0.9


class _Lines(TorchFunctionMode):
    """Keeps the user's lines that touch some memory.

    Args:
        memory: Addresses of tensors.
    """

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self.lines: dict[Where, None] = {}
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ("data_ptr", "__get__", "__set__"):
            for tensor in tree_leaves(args):
                if isinstance(tensor, torch.Tensor) and address_of(tensor) in self._memory:
                    line = users_line()
                    if line is not None:
                        self.lines[line] = None
        return result


class Averages:
    """What looks like an average of the weights, from a skipped step to the next backward.

    Args:
        record: Where a move is noted.
        trained: Tells the weights of all optimizers.
    """

    def __init__(self, record: Record, trained: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._record = record
        self._trained = trained
        self._before: list[tuple[TensorWeakRef, torch.Tensor, list[torch.Tensor]]] = []
        self._modes: list[_Lines] = []  # entered; at most the last one is in use

    def begin(self, moved: bool) -> None:
        """A step was skipped; `moved` tells whether an earlier one was not."""
        if not moved or self._before:
            return
        self._before = [
            (TensorWeakRef(tensor), tensor.detach().clone(), weights)
            for tensor, weights in self._candidates()
        ]
        if self._before:
            alive = (reference() for reference, _, _ in self._before)
            lines = _Lines({address_of(tensor) for tensor in alive if tensor is not None})
            lines.__enter__()  # type: ignore[no-untyped-call]
            self._modes.append(lines)

    def compare(self) -> None:
        """Note whether one has moved since the skipped step."""
        lines = list(self._modes[-1].lines) if self._modes else []
        before, self._before = self._before, []
        self.leave()
        if not before:
            return
        known = {id(each) for reference, value, _ in before for each in (reference(), value)}
        moved = 0
        for reference, value, weights in before:
            tensor = reference()
            now = [tensor] if tensor is not None else self._new_ones_like(value, known)
            moved += any(_moves_towards(value, each, weights) for each in now)
        self._record.note("skipped step", moved=moved, lines=lines)

    def leave(self) -> None:
        """Leave the modes that nobody reads any more, as far as that can be done here.

        A backward is called by the mode that watches it, and that is not there meanwhile.
        """
        while not self._before and self._modes and _innermost() is self._modes[-1]:
            mode: Any = self._modes.pop()
            mode.__exit__(None, None, None)

    def _new_ones_like(self, value: torch.Tensor, known: set[int]) -> Iterator[torch.Tensor]:
        """What may have come in the place of a tensor that is gone."""
        for tensor, _ in self._candidates():
            if tensor.shape == value.shape and id(tensor) not in known:
                yield tensor

    def _candidates(self) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Tensors that nobody trains and that are near weights, with those."""
        weights = [p for p in self._trained() if p.dtype.is_floating_point]
        by_shape: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
        for weight in weights:
            if weight.numel() >= _LEAST:
                by_shape[weight.shape, weight.dtype, weight.device].append(weight)
        theirs = {
            address_of(tensor) for p in weights for tensor in (p, p.grad) if tensor is not None
        }
        # An object may claim another class than its type. There are many that are no tensors.
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        for thing in tensors:
            if not _has_memory(thing) or address_of(thing) in theirs:
                continue
            like = by_shape.get((thing.shape, thing.dtype, thing.device), ())
            near = [weight for weight in like if _similarity(thing, weight) > _NEAR]
            if near:
                yield thing, near


def _innermost() -> Any:
    stack: Any = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return stack[-1] if stack else None


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it holds numbers, unlike a sparse one, or a fake one that the compiler left."""
    return tensor.layout is torch.strided and not is_stand_in(tensor)


def _similarity(tensor: torch.Tensor, weight: torch.Tensor) -> float:
    """The cosine between them; 0 for a copy, which is no average."""
    one, other = tensor.detach().flatten(), weight.detach().flatten()
    if torch.equal(one, other):
        return 0.0
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def _moves_towards(old: torch.Tensor, new: torch.Tensor, weights: list[torch.Tensor]) -> bool:
    """Whether a tensor has moved a part of its way to a weight, as averages do and copies do not.

    What a forward moves, as running statistics, goes another way.
    """
    way = new.detach() - old
    return any(
        not torch.equal(new, weight) and _similarity(way, weight.detach() - old) > _NEAR
        for weight in weights
    )


def address_of(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a sparse tensor has none
        return 0
