"""Float32 islands: modules that compute in float32 inside an autocast model.

Use them for what overflows or rounds too coarsely in 16 bits: large logits, norms,
attention scores. An island casts its 16-bit inputs to float32 and runs its `forward`
with autocast off. The documentation of `torch.autocast` does the same, but an island
needs no change in the model's source.

* Results stay float32, as those of autocast's own float32 operations do. Cast to 16
  bits, they would overflow after all. The next product or convolution casts them, sums
  and `cat` promote, and an in-place sum rounds to its target. `index_put`, `scatter`
  and `lerp` into a 16-bit tensor raise an error.
* `forward` is replaced on the instance, so names, `state_dict` keys and types stay. It
  is a `partial` of a bound method because `copy.deepcopy` and `pickle` rebind that to
  the copy. A closure would go on calling the original's `forward`.
* A context manager turns autocast off, not a pair of hooks: checkpointing leaves a
  recomputed `forward` by an exception, and must restore autocast, too.
* Only a module that is called can be an island. `nn.MultiheadAttention` reads the
  weights of its `out_proj` itself, so name the attention instead.
* `torch.compile` leaves islands out. The backward of a compiled island would use the
  surrounding autocast and multiply in 16 bits (pytorch issue 179804; seen with torch
  2.3 and 2.15).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn

from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.tensors import SIXTEEN_BITS
from determined_amp.amp.torch_private import is_compiled, version_of


class IslandError(UserError):
    """The patterns of `fp32_modules` match no module, or leave nothing to autocast."""


def keep_in_float32(
    model: nn.Module,
    patterns: Sequence[str],
    device_type: str,
    *,
    compiled: bool = False,
) -> list[str]:
    """Turn the matching modules into islands. Without autocast they compute as before.

    Args:
        model: The model, before `context.wrap_model`; changed in place.
        patterns: Regular expressions, searched for in the names of
            `model.named_modules()`. A container without a `forward` (`nn.ModuleList`)
            stands for its members.
        device_type: Where the model computes: "cpu" or "cuda".
        compiled: Whether the model around the islands will be compiled. A model that is
            compiled already is recognised.

    Returns:
        The names of the islands, in the order of `named_modules()`.

    Raises:
        IslandError: naming every pattern that is not a regular expression or matches no
            module; or if every parameter is in an island, or an island would be the
            `out_proj` of an attention.
    """
    names = _chosen(model, patterns)
    # Only where it is needed, because `torch.compiler.disable` imports the compiler.
    in_float32 = _in_float32
    if names and (compiled or is_compiled(model)):
        in_float32 = torch.compiler.disable(_in_float32)  # type: ignore[no-untyped-call]  # torch
    for name in names:
        module = model.get_submodule(name)
        module.forward = partial(in_float32, module.forward, device_type)
    return names


@contextmanager
def meanwhile_in_float32(
    modules: Iterable[nn.Module], device_type: str
) -> Iterator[None]:
    """Turn modules into islands in this block, to see whether that helps."""
    with ExitStack() as stack:
        for module in modules:
            forward = partial(_in_float32, module.forward, device_type)
            stack.enter_context(patched(module, "forward", forward))
        yield


def matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """The patterns that match a module of this model or are not regular expressions."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return [pattern for pattern in patterns if _matching(modules, pattern)]


def _chosen(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    modules = dict(model.named_modules(remove_duplicate=False))
    islands: set[str] = set()
    problems = []
    for pattern in patterns:
        matches = _matching(modules, pattern)
        if isinstance(matches, re.error):
            problems.append(
                f"got {pattern!r}, which is not a regular expression: {matches}"
            )
        elif not matches:
            problems.append(
                f"got {pattern!r}, which matches no module; {_near(pattern, modules)}"
            )
        else:
            islands.update(matches)
    for name in sorted(islands):
        attention = name.rpartition(".")[0]
        reads = isinstance(modules.get(attention), nn.MultiheadAttention)
        if reads and attention not in islands:
            problems.append(
                f"got {list(patterns)}, which match {name}, but nn.MultiheadAttention "
                f"never calls it and reads its weights itself; allowed: {attention}"
            )
    if islands and not _parameters_outside(model, islands):
        problems.append(
            f"got {list(patterns)}, which leave no parameter outside; "
            "allowed: patterns for a part of the model, or precision fp32"
        )
    if problems:
        raise IslandError(
            "\n".join(f"amp.fp32_modules: {problem}" for problem in problems)
        )
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
    # the root, named "", holds all parameters
    prefixes = tuple(f"{name}." if name else "" for name in islands)
    return not all(name.startswith(prefixes) for name, _ in model.named_parameters())


def _near(pattern: str, modules: dict[str, nn.Module]) -> str:
    """Up to three names that end like `pattern`; without any, the first names."""
    names = [name for name in modules if name]
    last_parts = {name: name.rpartition(".")[2] for name in names}
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]+", ".", pattern).strip(".")
    alike = get_close_matches(plain.rpartition(".")[2], last_parts.values())
    near = [name for name in names if last_parts[name] in alike][:3]
    if near:
        return f"near names: {', '.join(near)}"
    return f"the first of its {len(names)} modules: {', '.join(names[:5]) or 'none'}"


def _in_float32(
    forward: Callable[..., Any], device_type: str, /, *args: Any, **kwargs: Any
) -> Any:
    replaced: list[tuple[Any, Any]] = []
    cast_args, cast_kwargs = as_float32((args, kwargs), replaced)
    with torch.autocast(device_type, enabled=False):
        output = forward(*cast_args, **cast_kwargs)
    write_back(replaced)
    return output


def write_back(replaced: Sequence[tuple[Any, Any]]) -> None:
    """Copy what a module wrote into the casts of `as_float32` to the caller's objects.

    Args:
        replaced: The pairs that `as_float32` collected.
    """
    original_of = {id(cast): original for original, cast in replaced}
    for original, cast in replaced:
        if isinstance(original, torch.Tensor):
            if not cast.is_inference() and version_of(cast):  # was written in place
                original.copy_(cast)
        elif isinstance(original, list):
            original[:] = [original_of.get(id(item), item) for item in cast]
        elif isinstance(original, dict):
            for key in original.keys() - cast.keys():
                del original[key]
            for key, item in cast.items():
                own = original_of.get(id(item), item)
                if key not in original or original[key] is not own:
                    original[key] = own


def as_float32(value: Any, replaced: list[tuple[Any, Any]] | None = None) -> Any:
    """Cast the 16-bit tensors in nested tuples, lists, dicts and dataclasses.

    A container without such a tensor is returned itself, so that a module can still
    write to it.

    Args:
        value: Anything.
        replaced: Collects a pair (old, new) for each tensor and container that was
            replaced.
    """
    cast = value
    if isinstance(value, torch.Tensor):
        if value.dtype in SIXTEEN_BITS:
            cast = value.float()
    elif items := items_of(value):
        casts = {key: as_float32(item, replaced) for key, item in items.items()}
        if any(casts[key] is not item for key, item in items.items()):
            cast = with_items(value, casts)
    if replaced is not None and cast is not value:
        replaced.append((value, cast))
    return cast


def items_of(value: Any) -> Mapping[Any, Any]:
    """The items of a container by key, index or field; empty for anything else."""
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}
    return {}


def with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """A copy of a container with other items under the same keys."""
    if isinstance(value, (list, tuple)):
        has_names = hasattr(value, "_fields")  # a namedtuple
        kind, others = type(value), items.values()
        return kind(*others) if has_names else kind(others)
    copied = copy.copy(value)
    attributes = getattr(copied, "__dict__", ())
    for key, item in items.items():
        if isinstance(value, dict):
            copied[key] = item
        # A field, even of a frozen dataclass, or an item that is also an attribute.
        if key in attributes or not isinstance(value, dict):
            object.__setattr__(copied, key, item)
    return copied
