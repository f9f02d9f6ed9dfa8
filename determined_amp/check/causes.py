"""Finds out why a loss is not finite: which operation makes it so, and what helps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from threading import get_ident
from typing import Any

import torch
from torch import nn

from determined_amp.amp.rehearse.backward_graph import module_names
from determined_amp.amp.rehearse.diagnosis import fault_of_input
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
from determined_amp.check.record import Cause, Record, users_line

# So many forwards are looked at: each takes several times as long.
_MOST_LOOKS = 12
# After so many backwards a forward is looked at without a reason.
_ANYWAY = (3, 12)


class Other:
    """The same forward in another precision, operation by operation.

    Each storage of numbers that was computed has another one here, with the numbers
    that the operations give in this precision.

    Args:
        rounds: The dtype that results are rounded to where they have 16 bits; None for
            float32.
    """

    def __init__(self, rounds: torch.dtype | None) -> None:
        self._rounds = rounds
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
            is_view = _address(result) in given and not changes
            differs = result.dtype in SIXTEEN_BITS or self._numbers.keys() & given
            has_numbers = result.is_floating_point() and result.numel()
            if has_numbers and differs and not is_view:
                self._write(result, self._rounded(result, numbers))

    def _write(self, result: torch.Tensor, numbers: torch.Tensor) -> None:
        address = _address(result)
        if address not in self._numbers:
            storage = result.untyped_storage()
            whole = torch.empty(0, dtype=result.dtype).set_(storage)
            self._storages.append(storage)
            self._numbers[address] = whole.float().clone()
        self.of(result).copy_(numbers)

    def _rounded(self, made: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        if self._rounds and made.dtype in SIXTEEN_BITS:
            return numbers.to(self._rounds).float()
        return numbers


class Glance(OverflowWatch):  # type: ignore[no-untyped-call]  # torch has no types
    """Looks at one forward for what 16 bits cannot hold, whatever the loss is.

    Args:
        models: The models whose modules name the places.

    Attributes:
        hidden: The first operation that overflows in 16 bits alone.
        rounded: The first cast of whole numbers to 16 bits that changes one: the
            largest of them, and the line.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models)
        self.hidden: Cause | None = None
        self.rounded: tuple[str, Where | None] | None = None
        self._places = {
            name: f"in {name} ({type(module).__name__})"
            for module, name in module_names(models).items()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is READ and not isinstance(args[0], torch.Tensor):
            return args[0]  # torch hands a number of Python's on as it is
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._graph.in_backward:
            with suppress(Exception):  # of what no look can read
                self._glance(func, result, args, kwargs)
        return result

    def _look_at_node(self, *node: Any) -> None:
        with suppress(Exception):
            super()._look_at_node(*node)

    def _glance(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        known = len(self.forward)
        self._look_at_result(func, result, (args, kwargs))
        if getattr(func, "overloadpacket", None) is CAST and self.rounded is None:
            self._compare_whole_numbers(args[0], result)
        # What changes its argument in place cannot be computed again.
        is_first = self.hidden is None and len(self.forward) > known
        if is_first and has_overflown(result) and not _changes(func):
            exact = Other(None).compute(func, args, kwargs, changes=False)
            self._note_hidden(self.forward[-1], exact)

    def _compare_whole_numbers(self, given: torch.Tensor, made: torch.Tensor) -> None:
        is_whole = not (given.is_floating_point() or given.is_complex())
        is_whole = is_whole or _are_positions(given)
        if is_whole and made.dtype in SIXTEEN_BITS and (made.double() != given).any():
            text = f"{int(given.abs().max())} in {dtype_name(made.dtype)}"
            self.rounded = text, users_line()

    def _note_hidden(self, place: Place, exact: Any) -> None:
        numbers = tensors_of(exact)
        if place.dtype in SIXTEEN_BITS and numbers and all(map(is_finite, numbers)):
            text = f"{self._text(place)}, {_limit(place.dtype)}"
            self.hidden = Cause(text, users_line(), text)

    def _text(self, place: Place) -> str:
        operation = "a cast" if place.key[1] == CAST.__name__ else place.key[1]
        return f"{operation} {self._in(place.module)}"

    def _in(self, module: str) -> str:
        return self._places.get(module, "outside the model")


class CauseWatch(Glance):  # type: ignore[no-untyped-call]  # torch has no types
    """Computes one forward in float32 and in bfloat16, too.

    Args:
        models: The models whose modules name the places.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models)
        self._float32, self._bfloat16 = Other(None), Other(torch.bfloat16)
        # Of each place: whether its result is finite in float32, and the line.
        self._seen: list[tuple[Place, bool, Where | None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._graph.in_backward or func is READ:
            return super().__torch_dispatch__(func, types, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        others = [] if draws else [self._float32, self._bfloat16]
        changes = _changes(func)
        made = [other.compute(func, args, kwargs, changes=changes) for other in others]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for other, numbers in zip(others, made, strict=True):
            other.keep((args, kwargs), result, numbers, changes=changes)
        if len(self.forward) > len(self._seen):
            exact = all(map(is_finite, tensors_of(made[:1])))
            self._seen.append((self.forward[-1], exact, users_line()))
        return result

    def is_exact(self, made: torch.Tensor) -> bool:
        """Whether what this forward has made is finite in float32."""
        return is_finite(self._float32.of(made))

    def cause(self, made: torch.Tensor, name: str = "the loss") -> Cause | None:
        """Why that is not finite; None if no operation of this forward tells."""
        in_float32 = self.is_exact(made)
        seen = [each for each in self._seen if each[1] is in_float32]
        if not seen:
            return None
        place, _, where = seen[0]
        text = self._text(place)
        if not in_float32:
            text += ", also in float32: the precision is not the cause"
            return Cause(text, where, text)
        text += f", {_limit(place.dtype)}; tried: {name} is finite in float32"
        advice = f"float32 from there to {name}: {name} is finite in float32"
        if is_finite(self._bfloat16.of(made)):
            text += " and in bfloat16"
            advice += (
                ";\nor dtype=torch.bfloat16, if nothing is cast to float16 by hand"
            )
        return Cause(text, where, advice)

    def cause_of_gradients(self) -> Cause | None:
        """Which module makes gradients that are not finite of a loss that is."""
        if self.backward is None:
            return None
        place = self._in(self.backward)
        text = f"the backward {place}, whose gradients are not finite"
        return Cause(text, None, text, is_of_loss=False)


def _are_positions(numbers: torch.Tensor) -> bool:
    """Whether each is its neighbour and 1, as of `torch.arange`."""
    if numbers.dtype is not torch.float32 or numbers.numel() < 2:
        return False
    steps = numbers.diff(dim=numbers.shape.index(max(numbers.shape)))
    return bool((steps == 1).all())


def _changes(operation: Any) -> bool:
    """Whether it changes an argument in place."""
    # `batch_norm` changes its statistics, and its schema does not say so.
    return is_in_place(operation) or "batch_norm" in str(operation)


def overflow_in(module: nn.Module, inputs: Any) -> Cause | None:
    """Why a forward overflows that would not in float32.

    Args:
        module: A module, which stays as it is.
        inputs: What it has computed with.
    """
    # It may refuse a copy, or want arguments by name, too.
    with suppress(Exception):
        copied = copy.deepcopy(module)
        watch = CauseWatch([copied])
        with watch.watching():
            outputs = tensors_of(copied.forward(*inputs))
        bad = next(each for each in outputs if has_overflown(each))
        return watch.cause(bad, "the output") if watch.is_exact(bad) else None
    return None


def has_overflown(value: Any) -> bool:
    """Whether it has NaN or infinity; minus infinity is a mask."""
    tensors = [each for each in tensors_of(value) if each.is_floating_point()]
    return any(bool((each.isnan() | each.isposinf()).any()) for each in tensors)


def _limit(dtype: torch.dtype) -> str:
    if dtype not in SIXTEEN_BITS:
        return "of numbers that 16 bits have rounded"
    limit = torch.finfo(dtype).max
    return f"beyond {dtype_name(dtype)}, which ends at {limit:g}"


class Attempts:
    """Follows each loss to its backward, and looks at those that overflow.

    Args:
        record: What is seen is noted there.
        roots: The modules that the training calls itself.
        looks_anyway: Whether to look at two forwards without a reason. Meanwhile torch
            may choose other kernels, which round differently.

    Attributes:
        loss: The newest number with a gradient that the training has computed.
        line: Where it has.
    """

    def __init__(
        self, record: Record, roots: Iterable[nn.Module], *, looks_anyway: bool
    ) -> None:
        self.loss: torch.Tensor | None = None
        self.line: Where | None = None
        self._record = record
        self._roots = roots
        self._anyway = _ANYWAY if looks_anyway else ()
        self._batch: Any = None
        self._left = 0  # forwards that may be looked at, for the newest reason
        self._watch: Glance | None = None
        self._threads: set[int] = set()  # that run backwards: a mode is of one of them
        self._stack = ExitStack()  # of what watches

    def begin(self, batch: Any = None) -> None:
        """A batch begins."""
        self._batch = batch
        self.look()

    def look(self) -> None:
        """Watch what is computed until the next backward, if it is time to."""
        if self._watch is not None or len(self._threads) > 1:
            return
        count = len(self._record.of("backward"))
        if self._left > 0:
            self._watch = CauseWatch([*self._roots])
        elif count in self._anyway and self._record.regions:
            self._watch = Glance([*self._roots])
        if self._watch is not None:
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
        self._threads.add(get_ident())
        self._left -= isinstance(self._watch, CauseWatch)
        bad = [loss for loss in losses if not is_finite(loss)]
        if bad or not math.isfinite(added):
            self._judge(bad)
        elif self._watch:
            self._record.hidden = self._record.hidden or self._watch.hidden
            self._record.rounded = self._record.rounded or self._watch.rounded
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
        known = self._record.cause
        if known and (known.is_of_loss or not bad):
            return
        fault = fault_of_input(self._batch) if bad else None
        watch = self._watch
        if fault is not None:
            self._know(Cause(fault, None, fault))
        elif not isinstance(watch, CauseWatch):
            self._left = _MOST_LOOKS
        else:
            self._know(watch.cause(bad[0]) if bad else watch.cause_of_gradients())

    def _know(self, cause: Cause | None) -> None:
        if cause is not None:
            self._record.cause, self._left = cause, 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
