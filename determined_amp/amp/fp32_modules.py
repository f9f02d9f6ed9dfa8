"""Float32 islands: modules that compute in float32 while the model around them is autocast.

For what overflows or rounds too coarsely in 16 bits: large logits, norms, attention scores. An
island casts its 16-bit inputs up and runs its `forward` with autocast off, as the documentation of
`torch.autocast` does it, but needs no change of the model's source.

* Its results stay float32, as those of autocast's own float32 operations do. Cast down they would
  overflow after all. The next product or convolution casts them, sums and `cat` promote, an
  in-place sum rounds to its target; `index_put`, `scatter` and `lerp` into a 16-bit tensor raise.
* `forward` is replaced on the instance: names, `state_dict` keys and types stay. It is a `partial`
  of a bound method because `copy.deepcopy` and `pickle` rebind that to the copy; a closure would go
  on calling the original's `forward`.
* A context manager, not a pair of hooks: checkpointing leaves a recomputed `forward` by an
  exception, and autocast must come back then too.
* Only a module that is called can be an island. `nn.MultiheadAttention` reads the weights of its
  `out_proj` itself: name the attention.
* `torch.compile` leaves an island out. Compiled, its backward would multiply in 16 bits, seen with
  torch 2.3 and 2.15: its autocast is the surrounding one (pytorch issue 179804).
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution, Transform

from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched


class IslandError(UserError):
    """The patterns of `fp32_modules` name no module, or leave nothing to autocast."""


def keep_in_float32(
    model: nn.Module, patterns: Sequence[str], device_type: str, *, compiled: bool = False
) -> list[str]:
    """Turn the matching modules into islands; where autocast is off they compute as before.

    Args:
        model: The model, before `context.wrap_model`; changed in place.
        patterns: Regular expressions, searched for in the names of `model.named_modules()`. A
            container without a `forward` (`nn.ModuleList`) stands for its members.
        device_type: Where the model computes: "cpu" or "cuda".
        compiled: Whether the model around the islands will be compiled; one that is compiled
            already is recognised.

    Returns:
        The names of the islands, in the order of `named_modules()`.

    Raises:
        IslandError: naming every pattern that is no regular expression or matches no module; or if
            every parameter is in an island.
    """
    names = _chosen(model, patterns)
    # Asked only where it is needed: it imports the compiler.
    in_float32 = _in_float32
    if names and (compiled or is_compiled(model)):
        in_float32 = torch.compiler.disable(_in_float32)  # type: ignore[no-untyped-call]  # torch
    for name in names:
        module = model.get_submodule(name)
        module.forward = partial(in_float32, module.forward, device_type)
    return names


@contextmanager
def meanwhile_in_float32(modules: Iterable[nn.Module], device_type: str) -> Iterator[None]:
    """Make islands of these modules in this block, to see whether that helps."""
    with ExitStack() as stack:
        for module in modules:
            forward = partial(_in_float32, module.forward, device_type)
            stack.enter_context(patched(module, "forward", forward))
        yield


def is_compiled(model: nn.Module) -> bool:
    """Whether the user has compiled it, with `torch.compile(model)` or `model.compile()`."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The patterns that match a module of this model, or are no regular expressions."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [pattern for pattern in patterns if _matching(modules, pattern)]


def _chosen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    islands: set[str] = set()
    problems = []
    for pattern in patterns:
        matches = _matching(modules, pattern)
        if isinstance(matches, re.error):
            problems.append(f"got {pattern!r}, which is not a regular expression: {matches}")
        elif not matches:
            problems.append(f"got {pattern!r}, which matches no module; {_near(pattern, modules)}")
        else:
            islands.update(matches)
    if islands and not _parameters_outside(model, islands):
        problems.append(
            f"got {list(patterns)}, which leave no parameter outside; "
            "allowed: patterns for a part of the model, or precision fp32"
        )
    if problems:
        raise IslandError("\n".join(f"amp.fp32_modules: {problem}" for problem in problems))
    return [name for name in modules if name in islands]


def _matching(modules: dict[str, nn.Module], pattern: str) -> list[str] | re.error:
    """The names that a pattern matches, or the error in the pattern."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        return error
    names, containers = [], set()
    for name, module in modules.items():  # parents come before their children
        if search(name) or (name and name.rpartition(".")[0] in containers):
            if type(module).forward is nn.Module.forward:
                containers.add(name)
            else:
                names.append(name)
    return names


def _parameters_outside(model: nn.Module, islands: set[str]) -> bool:
    prefixes = tuple(f"{name}." if name else "" for name in islands)  # the root holds all names
    return not all(name.startswith(prefixes) for name, _ in model.named_parameters())


def _near(pattern: str, modules: dict[str, nn.Module]) -> str:
    """Up to three names like `pattern`, in whole or in their last part; else the first names."""
    names = [name for name in modules if name]
    last_parts = {name.rpartition(".")[2]: name for name in reversed(names)}
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", ".", pattern).strip(".")
    close = difflib.get_close_matches
    near = close(plain, names) + [last_parts[p] for p in close(plain.split(".")[-1], last_parts)]
    if near:
        return f"near names: {', '.join(list(dict.fromkeys(near))[:3])}"
    return f"the first of its {len(names)} modules: {', '.join(names[:5]) or 'none'}"


def _in_float32(forward: Callable[..., Any], device_type: str, /, *args: Any, **kwargs: Any) -> Any:
    replaced: list[tuple[Any, Any]] = []
    cast_args, cast_kwargs = as_float32((args, kwargs), replaced)
    with torch.autocast(device_type, enabled=False):
        output = forward(*cast_args, **cast_kwargs)
    write_back(replaced)
    return output


def write_back(replaced: Sequence[tuple[Any, Any]], *, untraced: bool = False) -> None:
    """Copy what was written into the casts of `as_float32` back to the caller's objects.

    Args:
        replaced: The pairs of `as_float32`.
        untraced: Whether to look for what was written through `.data`, too, which leaves no trace.
            Each cast is copied for that; where nothing was written it changes nothing.
    """
    original_of = {id(cast): original for original, cast in replaced}

    def back(value: Any) -> Any:
        return original_of.get(id(value), value)

    for original, cast in replaced:
        if isinstance(original, torch.Tensor):
            if not cast.is_inference() and cast._version:  # in place
                original.copy_(cast)
            elif untraced and _is_writable(original):
                original.data.copy_(cast.data)
        elif isinstance(original, (list, deque)):
            items = [*map(back, cast)]
            original.clear()
            original.extend(items)
        elif isinstance(original, MutableMapping):
            for key in original.keys() - cast.keys():
                del original[key]
            for key, value in cast.items():
                if key not in original or original[key] is not back(value):
                    original[key] = back(value)


def _is_writable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided, and no number of it is in several places, as of `expand`."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size < 2 for size, stride in sizes)


# Types of most of what modules keep and get; no container of these alone needs a search.
_PLAIN = frozenset((bool, float, int, str, type(None)))

# Containers by id, each with its cast: one may be in several places, or hold itself.
_Known = dict[int, tuple[Any, Any]]


def as_float32(
    value: Any, replaced: list[tuple[Any, Any]] | None = None, known: _Known | None = None
) -> Any:
    """Cast the float16 and bfloat16 tensors in nested containers, dataclasses and distributions.

    A container without such a tensor is returned itself, so that a module can still write to it.

    Args:
        value: Anything.
        replaced: Gets a pair for each tensor and container that was replaced: the old and the new.
        known: The containers that were met before.
    """
    if isinstance(value, torch.Tensor):
        is_16_bit = value.dtype in (torch.float16, torch.bfloat16)
        cast = value.float() if is_16_bit else value
    elif holds_no_tensor(value):
        return value
    else:
        known = {} if known is None else known
        if id(value) in known:
            return known[id(value)][1]
        known[id(value)] = value, value
        cast = _cast(value, replaced, known)
        known[id(value)] = value, cast
    if replaced is not None and cast is not value:
        replaced.append((value, cast))
    return cast


def holds_no_tensor(value: Any) -> bool:
    """Whether that is seen at once: this is asked very often. False if a search must tell."""
    kind = type(value)
    if kind is list or kind is tuple:
        return _PLAIN.issuperset(map(type, value))
    if kind is dict:
        return _PLAIN.issuperset(map(type, value.values()))
    return kind in _PLAIN


def _cast(value: Any, replaced: list[tuple[Any, Any]] | None, known: _Known) -> Any:
    if isinstance(value, (list, tuple)):
        items = [as_float32(item, replaced, known) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, deque):
        items = [as_float32(item, replaced, known) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else deque(items, value.maxlen)
    if isinstance(value, MutableMapping):
        cast = {key: as_float32(old, replaced, known) for key, old in value.items()}
        if any(cast[key] is not old for key, old in value.items()):
            value = copy.copy(value)  # one of the same kind
            for key, new in cast.items():
                value[key] = new
        return value
    held = fields_of(value)
    cast = {name: as_float32(old, replaced, known) for name, old in held.items()}
    if any(cast[name] is not old for name, old in held.items()):
        value = copy.copy(value)
        for name, new in cast.items():
            object.__setattr__(value, name, new)  # a frozen one, too
    return value


def fields_of(value: Any) -> dict[str, Any]:
    """What a dataclass, a namespace or a distribution holds, by name; else nothing."""
    is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module))
    if not (is_dataclass or isinstance(value, (SimpleNamespace, Distribution, Transform))):
        return {}
    names = set(getattr(value, "__dict__", {}))  # which one with slots has not
    names |= {field.name for field in dataclasses.fields(value)} if is_dataclass else set()
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
