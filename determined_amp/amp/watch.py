"""Looks at every result of one pass of a batch for the first one that is not finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from determined_amp.amp.origin import (
    OUTSIDE,
    Origin,
    backwards_through,
    hooked,
    module_names,
    only_views,
)
from determined_amp.amp.tensors import (
    has_nan,
    is_finite,
    largest_of,
    named_parameters,
    parameters_in,
    tensors_of,
)

# A mask may be -inf; what is computed from it is judged there.
_MASKS = {"fill", "fill_", "full_like", "index_fill", "index_fill_", "masked_fill", "masked_fill_"}
_UNINITIALISED = {"empty_like", "new_empty", "new_empty_strided"}

_MOST_PLACES = 16


class Place(NamedTuple):
    """An operation of a forward or backward.

    Args:
        module: The module whose forward it belongs to.
        operation: Its name.
        number: How many operations of that name the module has called before.
        between: For an operation between modules, the module whose forward ended last.
        cast_of: For a cast, the largest value that was cast.
        kind: What it was made of: "activation", or "weight" if a parameter was cast.
        dtype: The dtype of its result.
    """

    module: str
    operation: str
    number: int
    between: str | None
    cast_of: float | None
    kind: str
    dtype: torch.dtype

    @property
    def key(self) -> tuple[str, str, int]:
        return self.module, self.operation, self.number


@dataclass
class Seen:
    """What was seen in one pass.

    Args:
        forward: The first operations of the forward with finite inputs and results that are not.
        backward: The first such operation of the backward.
        largest_loss: The largest magnitude of the scaled losses.
        lost: Names of the parameters whose gradients are not finite, in the order of the backward.
        largest: The largest magnitudes of the recorded operations, by `Place.key`.
    """

    forward: list[Place] = field(default_factory=list)
    backward: Place | None = None
    largest_loss: float = 0.0
    lost: list[str] = field(default_factory=list)
    largest: dict[tuple[str, str, int], float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        return math.isfinite(self.largest_loss) and not self.lost

    def is_finite_at(self, place: Place) -> bool:
        """Whether an operation that overflowed in another pass is finite here, or a mere cast."""
        return place.cast_of is not None or math.isfinite(self.largest.get(place.key, math.nan))


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Looks at every result of a pass.

    Args:
        models: The models whose modules name the places. Their gradients must be finite.
        asked: `Place.key` of the operations whose largest result is recorded.
        optimizers: The optimizers. The same holds for parameters that only they have.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        models: Sequence[nn.Module],
        asked: set[tuple[str, str, int]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Seen()
        self._asked = asked
        self._origin = Origin(models)
        self._leaves = {n for m, n in module_names(models).items() if not list(m.children())}
        self._parameters: dict[str, torch.Tensor] = dict(named_parameters(models))
        others = set(parameters_in((), optimizers)) - set(self._parameters.values())
        self._parameters |= {f"(parameter {i} of no model)": p for i, p in enumerate(others)}
        self._calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at everything that is computed in this block."""

        def watched(run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad"):
                losses = [largest_of(loss) for loss in tensors_of(outputs)]
                # `max` would lose a NaN, which is not larger than any number.
                losses = [loss if math.isfinite(loss) else math.inf for loss in losses]
                self.seen.largest_loss = max(self.seen.largest_loss, *losses)
            return run(outputs, *args, **kwargs)

        with ExitStack() as stack:
            for name, parameter in self._parameters.items():
                stack.enter_context(hooked([parameter], partial(self._judge, name)))
            stack.enter_context(backwards_through(watched))
            stack.enter_context(self._origin.tracking())
            stack.enter_context(self)
            yield
        # A trial may set gradients itself. A backward reaches the last parameters first.
        for name, parameter in reversed(self._parameters.items()):
            if parameter.grad is not None:
                self._judge(name, parameter.grad)

    def _judge(self, name: str, gradient: torch.Tensor) -> None:
        if not is_finite(gradient) and name not in self.seen.lost:
            self.seen.lost.append(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = str(getattr(func, "overloadpacket", func)).rpartition(".")[2]
        node: Any = torch._C._current_autograd_node()
        results = [tensor for tensor in tensors_of(result) if tensor.is_floating_point()]
        is_repeated = node is not None and self._origin.current != OUTSIDE  # by a checkpoint
        if is_repeated or not results or operation in _UNINITIALISED or only_views(func):
            return result
        is_cast = operation == "_to_copy"
        module = self._origin.current if node is None else self._origin.of(node)
        key = module, operation, self._calls[module, operation]
        if node is None and not is_cast:  # casts differ between the precisions
            self._calls[module, operation] += 1
            if key in self._asked:
                self.seen.largest[key] = max(map(largest_of, results))
        if all(map(is_finite, results)) or operation in _MASKS:
            return result
        inputs = [t for t in tensors_of((args, kwargs or {})) if t.is_floating_point()]
        # A softmax over nothing but masks of -inf is NaN, though its inputs are not finite either.
        makes_nan = any(map(has_nan, results)) and not any(map(has_nan, inputs))
        if inputs and (makes_nan or all(map(is_finite, inputs))):
            cast_of = max(map(largest_of, inputs)) if is_cast else None
            between = None if module in self._leaves else self._origin.left
            kind = "weight" if is_cast and isinstance(inputs[0], nn.Parameter) else "activation"
            place = Place(*key, between, cast_of, kind, results[0].dtype)
            if node is not None:
                self.seen.backward = self.seen.backward or place
            elif len(self.seen.forward) < _MOST_PLACES:
                self.seen.forward.append(place)
        return result
