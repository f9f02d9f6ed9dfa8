"""Finds averages of weights, and sees whether a skipped step moves them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from determined_amp.check.finding import Where
from determined_amp.check.record import users_line

if TYPE_CHECKING:
    from determined_amp.check.spies import Spies

# Buffers that a forward moves, whatever comes of the step.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

# Elements of a tensor that is near a weight by no chance.
_LEAST = 16


class _Lines(TorchFunctionMode):
    """Keeps the user's lines that touch some memory.

    Args:
        memory: Addresses of tensors.
    """

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self.found: dict[Where, None] = {}
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ("data_ptr", "__get__", "__set__"):
            for tensor in tree_leaves(args):
                if isinstance(tensor, torch.Tensor) and _address(tensor) in self._memory:
                    line = users_line()
                    if line is not None:
                        self.found[line] = None
        return result


class Averages:
    """What looks like an average of the weights, from a skipped step to the next backward.

    Args:
        spies: Where a move is noted.
    """

    def __init__(self, spies: Spies) -> None:
        self._spies = spies
        self._before: list[tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        self._lines: Any = None

    def begin(self, moved: bool) -> None:
        """A step was skipped; `moved` tells whether an earlier one was not."""
        if not moved or self._before:
            return
        self._before = [
            (weakref.ref(tensor), tensor.detach().clone(), weight)
            for tensor, weight in self._candidates()
        ]
        if self._before:
            alive = (reference() for reference, _, _ in self._before)
            self._lines = _Lines({_address(tensor) for tensor in alive if tensor is not None})
            self._lines.__enter__()

    def compare(self) -> None:
        """Note whether one has moved since the skipped step."""
        if not self._before:
            return
        lines, self._lines = self._lines, None
        if lines is not None and _innermost() is lines:
            lines.__exit__(None, None, None)
        before, self._before = self._before, []
        moved = replaced = 0
        known = {id(reference()) for reference, _, _ in before}
        known |= {id(value) for _, value, _ in before}
        for reference, value, weight in before:
            tensor = reference()
            if tensor is None:
                replaced += self._is_replaced(value, weight, known)
            elif not torch.equal(tensor, value):
                moved += 1
        self._spies.note(
            "average",
            moved=moved + replaced,
            of=len(before),
            lines=list(lines.found) if lines is not None else [],
        )

    def _is_replaced(self, value: torch.Tensor, weight: torch.Tensor, known: set[int]) -> bool:
        """Whether a new tensor has come in the place of one that is gone."""
        return any(
            other is weight and id(tensor) not in known and not torch.equal(tensor, value)
            for tensor, other in self._candidates()
        )

    def _candidates(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors that nobody trains and that are near a weight, with that weight."""
        weights = [p for p in self._spies.trained() if p.dtype.is_floating_point]
        by_shape: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for weight in weights:
            if weight.numel() < _LEAST:  # near by chance
                continue
            by_shape.setdefault((weight.shape, weight.dtype, weight.device), []).append(weight)
        not_averages = {_address(p) for p in weights}
        not_averages |= {_address(p.grad) for p in weights if p.grad is not None}
        things = gc.get_objects()
        for thing in things:
            if issubclass(type(thing), nn.Module):
                named = vars(thing).get("_buffers") or {}
                found = (named.get(name) for name in _STATISTICS)
                not_averages |= {_address(buffer) for buffer in found if buffer is not None}
        for optimizer in self._spies.optimizers:
            states = tree_leaves([dict(state) for state in optimizer.state.values()])
            not_averages |= {_address(s) for s in states if isinstance(s, torch.Tensor)}
        for thing in things:
            if not issubclass(type(thing), torch.Tensor) or thing.layout is not torch.strided:
                continue
            for weight in by_shape.get((thing.shape, thing.dtype, thing.device), ()):
                if _address(thing) not in not_averages and _near(thing.detach(), weight.detach()):
                    yield thing, weight
                    break


def _innermost() -> Any:
    stack: Any = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return stack[-1] if stack else None


def _near(tensor: torch.Tensor, weight: torch.Tensor) -> bool:
    if torch.equal(tensor, weight):
        return False
    similar = torch.nn.functional.cosine_similarity(tensor.flatten(), weight.flatten(), dim=0)
    return bool(similar > 0.9)


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # neither sparse nor fake tensors have one
        return 0
