"""Runs the forward of a model under autocast if its code knows nothing of autocast."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.fp32_modules import as_float32, fields_of, holds_no_tensor
from determined_amp.amp.precision import autocast_is_on

_CONVERT = "or write the AMP in the trial itself: docs/your_trial.md shows the ten lines"
NO_AMP = (
    "neither autocast nor a GradScaler: here both come from outside (python -m determined_amp "
    "check examines AMP of the trial's own)"
)

# The attributes of every module, among them its parameters, buffers and hooks.
_OF_MODULES = frozenset(vars(nn.Module()))
# The length from which a container is not searched every time.
_LONG = 64


class OuterAutocast:
    """Runs a model's forward under autocast, and casts its results to float32.

    A copy of the model, such as an average of its weights, shares this object. A pickled model
    loses it, because it leaves the training.

    Args:
        amp: Makes the autocast of a training batch and that of a validation batch.

    Attributes:
        casts: Whether the precision has an autocast in 16 bits.
        training: Whether `train_batch` is running.
        in_backward: Whether a backward is running.
        wanted: By the casts that the trial has, and wants the gradients of, the tensors of this
            batch in 16 bits that they were cast from. Gradients need not pass through a cast.
    """

    def __init__(self, amp: AmpCore) -> None:
        self._amp = amp
        self.casts = amp.settings.precision.autocast_dtype is not None
        self._inside = False
        self._forwards = 0
        self._owned: list[_OwnAttributes] = []  # of every module
        self._searched: set[tuple[int, str]] = set()  # have held a tensor in 16 bits
        self.training = False
        self.in_backward = False
        self.wanted: dict[torch.Tensor, torch.Tensor] = {}

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_on = autocast_is_on(self._amp.device.type)
        # A wrapped model calls another one, or a checkpoint repeats such a call.
        if self._inside or (self.in_backward and is_on):
            return forward(*args, **kwargs)
        if self.training and is_on:
            raise refusal("it enters autocast itself", NO_AMP)
        amp, self._inside = self._amp, True
        try:
            with amp.autocast() if self.training else amp.eval_autocast():
                output = forward(*args, **kwargs)
        finally:
            self._inside = False
        if not self.casts:
            return output
        self._cast_kept()
        return as_float32(output)

    def _cast_kept(self) -> None:
        """Cast tensors that the models keep in attributes, such as features for the loss.

        Long containers, such as a vocabulary, are searched in forwards 1, 2, 4, 8 and so on, and in
        every one once they have held such a tensor.
        """
        self._forwards += 1
        searches_all = self._forwards & (self._forwards - 1) == 0
        if searches_all:
            modules = (m for model in self._amp.models for m in model.modules())
            self._owned = list(map(_OwnAttributes, modules))
        casts: list[tuple[Any, Any]] = []
        for owned in self._owned:
            attributes = owned.of_module
            for name in owned.names():
                value, before = attributes.get(name), len(casts)
                if holds_no_tensor(value):
                    continue
                key = id(attributes), name
                is_long = isinstance(value, (list, tuple, dict)) and len(value) > _LONG
                if is_long and not searches_all and key not in self._searched:
                    continue
                attributes[name] = _cast_inside(value, casts)
                if len(casts) > before:
                    self._searched.add(key)
        mark_casts(casts)
        for tensor, cast in casts:
            if tensor.retains_grad:
                cast.retain_grad()

    @contextmanager
    def handing_on_gradients(self) -> Iterator[None]:
        """After a backward in this block, add the gradients of `wanted` tensors to their casts'."""
        before = [(cast, cast.grad) for cast in self.wanted]
        for cast in self.wanted:
            cast.grad = None
        yield
        for cast, tensor in self.wanted.items():
            if tensor.grad is not None:
                # It has what came through the cast, too.
                cast.grad, tensor.grad = tensor.grad.float(), None
        for cast, earlier in before:
            if earlier is not None:
                cast.grad = earlier if cast.grad is None else earlier + cast.grad

    def __deepcopy__(self, memo: object) -> OuterAutocast:
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _no_autocast, ()


class _OwnAttributes:
    """The attributes of a module, without those that every module has.

    Args:
        module: The module; it may get other attributes later.
    """

    def __init__(self, module: nn.Module) -> None:
        self.of_module: dict[str, Any] = vars(module)
        self._names: list[str] = []
        self._known = (0, "")

    def names(self) -> list[str]:
        """The names, which are listed again if one was added or deleted: this runs very often."""
        attributes = self.of_module
        known = len(attributes), next(reversed(attributes))  # a new name is the last one
        if known != self._known:
            self._known = known
            self._names = [name for name in attributes if name not in _OF_MODULES]
        return self._names


def _cast_inside(
    value: Any, casts: list[tuple[Any, Any]], known: dict[int, tuple[Any, Any]] | None = None
) -> Any:
    """Cast the tensors in a container in place, since others may hold it; a tuple is made anew."""
    known = {} if known is None else known
    if isinstance(value, torch.Tensor):
        return as_float32(value, casts)
    if holds_no_tensor(value):
        return value
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = value, value
    if isinstance(value, tuple):
        items = [_cast_inside(item, casts, known) for item in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
            known[id(value)] = value, made
        return known[id(value)][1]
    put: Callable[[Any, Any], None]
    held: Iterable[tuple[Any, Any]]
    if isinstance(value, (list, deque)):
        put, held = value.__setitem__, enumerate(value)
    elif isinstance(value, MutableMapping):
        put, held = value.__setitem__, value.items()
    else:
        put, held = partial(object.__setattr__, value), fields_of(value).items()  # frozen, too
    for name, item in [*held]:
        cast = _cast_inside(item, casts, known)
        if cast is not item:
            put(name, cast)
    return value


def _no_autocast() -> Callable[..., Any]:
    return _call


def _call(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def mark_casts(casts: Sequence[tuple[Any, Any]]) -> None:
    """Note on each cast of a tensor what it was cast from; see `source_of`."""
    for tensor, cast in casts:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            cast._determined_amp_source = tensor


def source_of(cast: torch.Tensor) -> torch.Tensor | None:
    """The tensor in 16 bits that a tensor was cast from for the trial; None if it was not."""
    return getattr(cast, "_determined_amp_source", None)


def refusal(problem: str, instead: str) -> ConfigError:
    """The error for a trial that cannot be trained as it is.

    Args:
        problem: What its `train_batch` does.
        instead: What to write.
    """
    return ConfigError(
        "the trial", [f"train_batch: {problem}; write instead: {instead}; {_CONVERT}"]
    )
