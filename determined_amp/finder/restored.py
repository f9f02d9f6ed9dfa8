"""Restores the state of a training's objects after batches that ran outside the training."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data

Undo = Callable[[], object]

_PLAIN = (str, bytes, int, float, complex, type(None), type, types.ModuleType)
# A batch without a step leaves models, optimizers and data as they are, or other code restores
# them, and copies of their tensors may fill the memory. State that threads share must not be reset.
_LEFT_ALONE = (nn.Parameter, torch.optim.Optimizer, data.Dataset, data.DataLoader)
_CONCURRENT = {"asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading"}


@contextmanager
def restored(*roots: object, besides: tuple[type, ...] = ()) -> Iterator[None]:
    """After this block, restore the state of the objects and of everything they refer to.

    That is: attributes, items of lists, dictionaries, sets and queues, values of tensors and
    arrays, and states of random generators; in closures and bound methods, too. Iterators, files
    and the internal state of C extensions cannot be restored.

    Args:
        roots: Where to begin, such as a trial.
        besides: Types whose objects, and what they hold, are left alone.
    """
    undo: list[Undo] = []
    seen: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
    waiting: list[object] = list(roots)
    while waiting:
        value = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        of = type(value).__module__.partition(".")[0]
        if of in _CONCURRENT or isinstance(value, (*_LEFT_ALONE, *besides)):
            continue
        if isinstance(value, nn.parallel.DistributedDataParallel):  # half of its state is in C++
            waiting.append(value.module)
            continue
        undo += _undone(value)
        waiting += _held(value)
    try:
        yield
    finally:
        for each in undo:
            each()


def _undone(value: Any) -> Iterator[Undo]:
    """Functions that restore the content of one object itself."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_inference():
            yield functools.partial(_put_back_tensor, value, value.detach().clone())
    elif isinstance(value, np.ndarray):
        yield functools.partial(np.copyto, value, value.copy())
    elif isinstance(value, torch.Generator):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif isinstance(value, np.random.RandomState):
        yield functools.partial(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        yield functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, dict):
        yield functools.partial(_put_back_items, value, dict(value))
    elif isinstance(value, (list, deque)):
        yield functools.partial(_put_back_sequence, value, list(value))
    elif isinstance(value, set):
        yield functools.partial(_put_back_set, value, set(value))
    for name in _slots(value):
        yield functools.partial(setattr, value, name, getattr(value, name))
    if hasattr(value, "__dict__") and not isinstance(value, types.FunctionType):
        attributes = vars(value)
        yield functools.partial(_put_back_items, attributes, dict(attributes))


def _held(value: Any) -> Iterator[object]:
    """The objects that one object holds."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, types.FunctionType):
        yield from (cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    yield from (getattr(value, name) for name in _slots(value))
    if hasattr(value, "__dict__"):
        yield from vars(value).values()


def _slots(value: object) -> Iterator[str]:
    """The attributes of an object that are not in its `__dict__`, and have a value."""
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if isinstance(vars(kind).get(name), types.MemberDescriptorType) and hasattr(
                value, name
            ):
                yield name


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # not assigned yet
        return False
    return True


def _put_back_tensor(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.shape != before.shape:
            tensor.data = before
        elif not torch.equal(tensor, before):
            tensor.data.copy_(before)


def _put_back_items(items: dict[Any, Any], before: dict[Any, Any]) -> None:
    if [*map(id, items)] != [*map(id, before)] or any(items[k] is not v for k, v in before.items()):
        items.clear()
        for key, value in before.items():
            items[key] = value


def _put_back_sequence(items: list[Any] | deque[Any], before: list[Any]) -> None:
    if [*map(id, items)] != [*map(id, before)]:
        items.clear()
        items.extend(before)


def _put_back_set(items: set[Any], before: set[Any]) -> None:
    if items != before:
        items.clear()
        items.update(before)
