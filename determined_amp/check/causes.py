"""Finds the operation that makes a loss not finite, and a precision that helps.

`CauseSearch` follows the training from loss to loss. After a loss or gradients that are
not finite, it watches the next forwards with a `CauseWatch`, which computes every
operation in float32 and in bfloat16, too. The recorder calls it. `forwards.py` asks
`overflow_in` about validations.
"""

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

# How many forwards are watched for one reason. Each takes several times as long.
_MOST_LOOKS = 12
# The forward after this many backwards is watched without a reason.
_ANYWAY = (3, 12)


class OtherPrecision:
    """The same forward in another precision, operation by operation.

    Each storage that the forward computes has another one here, with the numbers that
    the operations give in the other precision.

    Args:
        rounds: The dtype to which results are rounded where the forward's have 16 bits;
            None for float32.
    """

    def __init__(self, rounds: torch.dtype | None) -> None:
        self._rounds = rounds
        self._numbers: dict[int, torch.Tensor] = {}  # by the storage's address
        self._storages: list[Any] = []  # kept, so that no address is reused

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of a tensor in the other precision, in float32."""
        numbers = self._numbers.get(_address(tensor))
        if numbers is None:
            return tensor.float() if tensor.dtype in SIXTEEN_BITS else tensor
        return numbers.as_strided(
            tensor.size(), tensor.stride(), tensor.storage_offset()
        )

    def compute(self, operation: Any, args: Any, kwargs: Any, *, changes: bool) -> Any:
        """Compute an operation in the other precision; None if it raises an error.

        Args:
            operation: The operation.
            args: Its arguments.
            kwargs: Its keyword arguments.
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
        """Keep the result of an operation, unless it is a view.

        Args:
            args: The arguments of the operation.
            made: Its result in the forward.
            other: Its result in the other precision; None if there is none.
            changes: Whether it changes an argument in place.
        """
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


class ForwardWatch(OverflowWatch):  # type: ignore[no-untyped-call]  # torch has no types
    """Watches one forward for what 16 bits cannot hold, even if the loss is finite.

    Args:
        models: The models whose modules name the places.

    Attributes:
        hidden_overflow: The first operation that overflows in 16 bits and not in
            float32.
        rounded_whole_number: The first cast to 16 bits that changes a whole number: the
            largest number that it casts, and the line.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models)
        self.hidden_overflow: Cause | None = None
        self.rounded_whole_number: tuple[str, Where | None] | None = None
        self._places = {
            name: f"in {name} ({type(module).__name__})"
            for module, name in module_names(models).items()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is READ and not isinstance(args[0], torch.Tensor):
            return args[0]  # already a Python number
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._graph.in_backward:
            with suppress(Exception):  # some results cannot be read
                self._look_at_call(func, result, args, kwargs)
        return result

    def _look_at_node(self, *node: Any) -> None:
        with suppress(Exception):
            super()._look_at_node(*node)

    def _look_at_call(self, func: Any, result: Any, args: Any, kwargs: Any) -> None:
        known = len(self.forward)
        self._look_at_result(func, result, (args, kwargs))
        if (
            getattr(func, "overloadpacket", None) is CAST
            and self.rounded_whole_number is None
        ):
            self._compare_whole_numbers(args[0], result)
        # An operation that changed its argument in place cannot be computed again.
        is_first = self.hidden_overflow is None and len(self.forward) > known
        if is_first and has_overflown(result) and not _changes(func):
            exact = OtherPrecision(None).compute(func, args, kwargs, changes=False)
            self._note_hidden(self.forward[-1], exact)

    def _compare_whole_numbers(self, given: torch.Tensor, made: torch.Tensor) -> None:
        is_whole = not (given.is_floating_point() or given.is_complex())
        is_whole = is_whole or _are_positions(given)
        if is_whole and made.dtype in SIXTEEN_BITS and (made.double() != given).any():
            text = f"{int(given.abs().max())} in {dtype_name(made.dtype)}"
            self.rounded_whole_number = text, users_line()

    def _note_hidden(self, place: Place, exact: Any) -> None:
        numbers = tensors_of(exact)
        if place.dtype in SIXTEEN_BITS and numbers and all(map(is_finite, numbers)):
            text = f"{self._text(place)}, {_limit(place.dtype)}"
            self.hidden_overflow = Cause(text, users_line(), text)

    def _text(self, place: Place) -> str:
        operation = "a cast" if place.key[1] == CAST.__name__ else place.key[1]
        return f"{operation} {self._in(place.module)}"

    def _in(self, module: str) -> str:
        return self._places.get(module, "outside the model")


class CauseWatch(ForwardWatch):  # type: ignore[no-untyped-call]  # torch has no types
    """Watches one forward, and computes it in float32 and in bfloat16, too.

    Args:
        models: The models whose modules name the places.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models)
        self._float32 = OtherPrecision(None)
        self._bfloat16 = OtherPrecision(torch.bfloat16)
        # Each place, whether its result is finite in float32, and the user's line.
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
        """Whether a result of this forward is finite in float32."""
        return is_finite(self._float32.of(made))

    def cause(self, made: torch.Tensor, name: str = "the loss") -> Cause | None:
        """Why a result of this forward is not finite; None if no operation explains it.

        Args:
            made: The result.
            name: What to call the result.
        """
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
        """Which backward makes gradients that are not finite, if one is known."""
        if self.backward is None:
            return None
        place = self._in(self.backward)
        text = f"the backward {place}, whose gradients are not finite"
        return Cause(text, None, text, is_of_loss=False)


def _are_positions(numbers: torch.Tensor) -> bool:
    """Whether each number is its neighbour plus 1, as in `torch.arange`."""
    if numbers.dtype is not torch.float32 or numbers.numel() < 2:
        return False
    steps = numbers.diff(dim=numbers.shape.index(max(numbers.shape)))
    return bool((steps == 1).all())


def _changes(operation: Any) -> bool:
    """Whether an operation changes an argument in place."""
    # `batch_norm` changes its statistics, but its schema does not say so.
    return is_in_place(operation) or "batch_norm" in str(operation)


def overflow_in(module: nn.Module, inputs: Any) -> Cause | None:
    """Why a forward overflows in 16 bits only; None if it is not known.

    Args:
        module: The module. A copy of it computes the forward again.
        inputs: The arguments of the forward.
    """
    # The module may refuse a copy, or need keyword arguments.
    with suppress(Exception):
        copied = copy.deepcopy(module)
        watch = CauseWatch([copied])
        with watch.watching():
            outputs = tensors_of(copied.forward(*inputs))
        bad = next(each for each in outputs if has_overflown(each))
        return watch.cause(bad, "the output") if watch.is_exact(bad) else None
    return None


def has_overflown(value: Any) -> bool:
    """Whether a value has NaN or infinity. Minus infinity is taken for a mask."""
    tensors = [each for each in tensors_of(value) if each.is_floating_point()]
    return any(bool((each.isnan() | each.isposinf()).any()) for each in tensors)


def _limit(dtype: torch.dtype) -> str:
    """Why a result of this dtype overflows."""
    if dtype not in SIXTEEN_BITS:
        return "of numbers that 16 bits have rounded"
    limit = torch.finfo(dtype).max
    return f"beyond {dtype_name(dtype)}, which ends at {limit:g}"


class CauseSearch:
    """Follows each loss to its backward, and looks for the cause if it is not finite.

    Args:
        record: Where causes are noted.
        roots: The modules that the training itself calls.
        looks_anyway: Whether to watch two forwards without a reason. While a forward is
            watched, torch may choose other kernels, which round differently.

    Attributes:
        loss: The newest number with a gradient that the training has computed.
        line: The user's line that computed it.
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
        # How many forwards may still be watched for the newest reason.
        self._watches_left = 0
        self._watch: ForwardWatch | None = None
        # The threads that run backwards. A mode watches only one thread.
        self._threads: set[int] = set()
        self._stack = ExitStack()  # ends the watch

    def begin_batch(self, batch: Any = None) -> None:
        """Begin a batch."""
        self._batch = batch
        self.watch_if_due()

    def watch_if_due(self) -> None:
        """Watch the operations until the next backward, if there is a reason to."""
        if self._watch is not None or len(self._threads) > 1:
            return
        count = len(self._record.of("backward"))
        if self._watches_left > 0:
            self._watch = CauseWatch([*self._roots])
        elif count in self._anyway and self._record.regions:
            self._watch = ForwardWatch([*self._roots])
        if self._watch is not None:
            self._stack.enter_context(self._watch.watching())

    def stop_watching(self) -> None:
        """End the watch."""
        self._stack.close()
        self._watch = None

    def end_backward(self, losses: Sequence[torch.Tensor], added: float) -> None:
        """Judge a backward that is over.

        Args:
            losses: The tensors at which it began.
            added: How much the norm of the gradients grew.
        """
        self._threads.add(get_ident())
        self._watches_left -= isinstance(self._watch, CauseWatch)
        bad = [loss for loss in losses if not is_finite(loss)]
        if bad or not math.isfinite(added):
            self._judge(bad)
        elif self._watch:
            self._record.hidden_overflow = (
                self._record.hidden_overflow or self._watch.hidden_overflow
            )
            self._record.rounded_whole_number = (
                self._record.rounded_whole_number or self._watch.rounded_whole_number
            )
        self.loss = None
        self.stop_watching()

    def end_forward(self) -> None:
        """Judge a loss that had no backward.

        The batch is over, or the next forward begins.
        """
        if self.loss is not None and not is_finite(self.loss):
            self._record.note("left_out").where = self.line
            self._judge([self.loss])
        self.loss = None

    def _judge(self, bad: Sequence[torch.Tensor]) -> None:
        """Note the cause, if it is known, or watch the next forwards.

        Args:
            bad: The losses that are not finite; if empty, the gradients are not.
        """
        known = self._record.cause
        if known and (known.is_of_loss or not bad):
            return
        fault = fault_of_input(self._batch) if bad else None
        watch = self._watch
        if fault is not None:
            self._note_cause(Cause(fault, None, fault))
        elif not isinstance(watch, CauseWatch):
            self._watches_left = _MOST_LOOKS
        else:
            self._note_cause(watch.cause(bad[0]) if bad else watch.cause_of_gradients())

    def _note_cause(self, cause: Cause | None) -> None:
        if cause is not None:
            self._record.cause, self._watches_left = cause, 0


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 for a sparse tensor."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
