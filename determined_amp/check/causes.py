"""Finds out why a loss is not finite: which operation makes it so, and what helps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from determined_amp.amp.rehearse.backward_graph import module_names
from determined_amp.amp.rehearse.overflows import OverflowWatch, Place
from determined_amp.amp.tensors import (
    SIXTEEN_BITS,
    dtype_name,
    is_finite,
    mapped,
    tensors_of,
)
from determined_amp.amp.torch_private import CAST, READ, is_in_place
from determined_amp.check.finding import Where
from determined_amp.check.lines import users_line
from determined_amp.check.record import Cause, Record

_FLOAT32, _BFLOAT16 = "in float32", "in bfloat16"

# So many forwards are looked at: each takes several times as long.
_MOST_LOOKS = 12


class Other:
    """The same forward in another precision, operation by operation.

    Each storage of numbers that was computed has another one here, with the numbers
    that the operations give in this precision.

    Args:
        rounds: The dtype that results are rounded to where they have 16 bits; None for
            float32.
        is_exact: Tells whether the operation that runs now is left in float32.
    """

    def __init__(
        self, rounds: torch.dtype | None, is_exact: Callable[[], bool] = lambda: False
    ) -> None:
        self._rounds = rounds
        self._is_exact = is_exact
        self._numbers: dict[int, torch.Tensor] = {}  # by the address of the storage
        self._storages: list[Any] = []  # so that no address is used again

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers that a tensor has in this precision, in float32."""
        numbers = self._numbers.get(_address(tensor))
        if numbers is None:
            return tensor.float() if tensor.dtype in SIXTEEN_BITS else tensor
        return numbers.as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def compute(self, operation: Any, args: Any, kwargs: Any, *, changes: bool) -> Any:
        """What an operation gives here; None if it cannot be told.

        Args:
            operation: The operation.
            args: Its arguments.
            kwargs: Those by name.
            changes: Whether it changes an argument in place.
        """

        def other(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                numbers = self._rounded(value, self.of(value))
                return numbers.clone() if changes else numbers
            is_dtype = isinstance(value, torch.dtype) and value in SIXTEEN_BITS
            return torch.float32 if is_dtype else value

        with suppress(Exception):  # it may not take float32
            return operation(*mapped(args, other), **mapped(kwargs, other))
        return None

    def keep(self, args: Any, made: Any, other: Any, *, changes: bool) -> None:
        """Keep the numbers that an operation has made, if these are no views."""
        given = {_address(each) for each in tensors_of(args)}
        results = zip(tensors_of(made), tensors_of(other), strict=False)
        for result, numbers in results if other is not None else ():
            address = _address(result)
            is_view = address in given and not changes
            differs = result.dtype in SIXTEEN_BITS or self._numbers.keys() & given
            if (
                not (result.is_floating_point() and result.numel() and differs)
                or is_view
            ):
                continue
            storage = result.untyped_storage()
            if not (changes and address in self._numbers):
                whole = torch.empty(0, dtype=result.dtype).set_(storage)
                self._storages.append(storage)
                self._numbers[address] = whole.float().clone()
            self.of(result).copy_(self._rounded(result, numbers))

    def _rounded(self, made: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        if made.dtype in SIXTEEN_BITS and self._rounds and not self._is_exact():
            return numbers.to(self._rounds).float()
        return numbers


class CauseWatch(OverflowWatch):  # type: ignore[no-untyped-call]  # torch has no types
    """Looks at one forward, and computes it in other precisions, too.

    Args:
        models: The models whose modules name the places.
        island: A module to try in float32, by its name.
    """

    def __init__(self, models: Sequence[nn.Module], island: str) -> None:
        super().__init__(models, [])
        self._others = {_FLOAT32: Other(None), _BFLOAT16: Other(torch.bfloat16)}
        if island:
            inside = f"{island}."

            def is_inside() -> bool:
                return f"{self._graph.current}.".startswith(inside)

            self._others[f"with {island} {_FLOAT32}"] = Other(torch.float16, is_inside)
        self.has_island = bool(island)
        self._kinds = {
            name: f"{name} ({type(module).__name__})"
            for module, name in module_names(models).items()
        }
        # Of each place: whether its result is finite in float32, and the line.
        self._seen: list[tuple[Place, bool, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is READ and not isinstance(args[0], torch.Tensor):
            return args[0]  # torch hands a number of Python's on as it is
        if self._graph.in_backward:
            return func(*args, **kwargs)
        # `batch_norm` changes its statistics, and its schema does not say so.
        changes = is_in_place(func) or "batch_norm" in str(func)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        others = {
            name: None if draws else other.compute(func, args, kwargs, changes=changes)
            for name, other in self._others.items()
        }
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for name, other in self._others.items():
            other.keep((args, kwargs), result, others[name], changes=changes)
        if len(self.forward) > len(self._seen):
            exact = all(map(is_finite, tensors_of(others[_FLOAT32])))
            self._seen.append((self.forward[-1], exact, users_line()))
        return result

    def cause(self, loss: torch.Tensor) -> Cause | None:
        """Why a loss is not finite; None if no operation of this forward tells."""
        helps = [
            name for name, each in self._others.items() if is_finite(each.of(loss))
        ]
        wanted = _FLOAT32 in helps
        seen = next((each for each in self._seen if each[1] is wanted), None)
        if seen is None:
            return None
        place, is_finite_in_float32, where = seen
        operation = "a cast" if place.key[1] == CAST.__name__ else place.key[1]
        text = f"{operation} in {self._kinds.get(place.module, place.module)}"
        if is_finite_in_float32:
            reason = "of numbers that 16 bits have rounded"
            if place.dtype in SIXTEEN_BITS:
                limit = torch.finfo(place.dtype).max
                reason = f"beyond {dtype_name(place.dtype)}, which ends at {limit:g}"
            text += f", {reason}; tried: the loss is finite {' and '.join(helps)}"
        else:
            text += ", also in float32: the precision is not the cause"
        return Cause(text, where, place.module, helps)

    def cause_of_gradients(self) -> Cause | None:
        """Which module makes gradients that are not finite of a loss that is."""
        if self.backward is None:
            return None
        return Cause(
            f"the gradients that {self.backward} makes", None, self.backward, []
        )


class Attempts:
    """Follows each loss to its backward, and looks at those that overflow.

    Args:
        record: What is seen is noted there.
        roots: The modules that the training calls itself.

    Attributes:
        loss: The newest number with a gradient that the training has computed.
        line: Where it has.
    """

    def __init__(self, record: Record, roots: Iterable[nn.Module]) -> None:
        self.loss: torch.Tensor | None = None
        self.line: Where | None = None
        self._record = record
        self._roots = roots
        self._batch: Any = None
        self._left = _MOST_LOOKS  # forwards that may still be looked at
        self._looks = False  # a loss was not finite, and its cause is not known
        self._watch: CauseWatch | None = None
        self._stack = ExitStack()  # of what watches

    def begin(self, batch: Any = None) -> None:
        """A batch begins."""
        self._batch = batch
        self.look()

    def look(self) -> None:
        """Watch what is computed until the next backward, if there is a reason."""
        if self._looks and self._left and self._watch is None:
            self._left -= 1
            island = self._record.cause.module if self._record.cause else ""
            self._watch = CauseWatch([*self._roots], island)
            self._stack.enter_context(self._watch.watching())

    def leave(self) -> None:
        """Look no further."""
        self._stack.close()
        self._watch = None

    def backward(self, losses: Sequence[torch.Tensor], added: float) -> None:
        """A backward is over.

        Args:
            losses: Where it began.
            added: The norm of the gradients that it has added.
        """
        bad = [loss for loss in losses if not is_finite(loss)]
        if bad or not math.isfinite(added):
            self._judge(bad)
        self.loss = None
        self.leave()

    def end_forward(self) -> None:
        """The batch is over, or its forward begins again."""
        if self.loss is not None and not is_finite(self.loss):
            self._record.note("left_out").where = self.line
            self._judge([self.loss])
        self.loss = None

    def _judge(self, bad: Sequence[torch.Tensor]) -> None:
        """These losses are not finite, or, without any, the gradients are not."""
        watch, known = self._watch, self._record.cause
        self._looks = self._looks or known is None
        for number, each in enumerate(tensors_of(self._batch)):
            if bad and each.is_floating_point() and not is_finite(each):
                text = f"input {number} of the batch: the precision is not the cause"
                self._know(Cause(text, None, "", []))
                return
        if watch is None:
            return
        found = watch.cause(bad[0]) if bad else watch.cause_of_gradients()
        if found is not None and (known is None or watch.has_island):
            self._know(found)
            self._looks = _FLOAT32 in found.helps and not watch.has_island

    def _know(self, cause: Cause) -> None:
        self._record.cause, self._looks = cause, False


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
