"""Reads in the graph of a loss how it was made: scaled, divided, in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.tensors import tensors_of

_SCALE, _DTYPE = "determined_amp.scale", "determined_amp.dtype_of_loss"
_GRADIENT = "determined_amp.gradient_of_scaled"
# Nodes that hand on a single value.
_HANDS_ON = ("ToCopy", "NanToNum", "View", "Squeeze", "Unsqueeze", "Clone", "Alias", "Reshape")
_ADDS = ("AddBackward0", "SubBackward0")
_MULTIPLIES = ("MulBackward0", "DivBackward0")
# No graph is read further than this.
_MOST_NODES = 20_000


@dataclass(frozen=True)
class Loss:
    """How a loss was made."""

    scale: float | None = None  # what a `GradScaler` multiplied it by
    scaler: int | None = None  # the number of that scaler
    divisor: float = 1.0  # what it was divided by, apart from the scale
    mean: bool = False  # what was divided is a mean
    sums: bool = False  # what was divided is a sum of several losses
    dtype: str = "float32"  # what it was computed in
    hides_nan: bool = False  # `nan_to_num` was applied to it
    has_gradient: bool = False  # it is several numbers, so the backward begins with a gradient
    penalty: float | None = None  # scale of gradients that are a part of it and were not unscaled
    in_part: bool = False  # only a part of it was scaled
    leaf: bool = False  # it was not computed from anything


def mark(scaled: Any, losses: Any, scale: float, scaler: int) -> None:
    """Remember in the graph that these tensors are losses that were scaled, and their dtype."""
    for each, loss in zip(tensors_of(scaled), tensors_of(losses), strict=True):
        node: Any = each.grad_fn
        if node is not None:
            node.metadata[_SCALE], node.metadata[_DTYPE] = (scale, scaler), loss.dtype


def mark_gradients(gradients: Any, scale: float | None) -> None:
    """Remember in the graph that these are gradients of a scaled loss."""
    for gradient in gradients if scale else ():
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.metadata[_GRADIENT] = scale


def loss_of(outputs: Any, scales: Sequence[float]) -> Loss:
    """How the first of the tensors that a backward begins at was made.

    Args:
        outputs: The tensors.
        scales: The present scale of each scaler, by which a training may multiply itself.
    """
    tensors = [each for each in outputs if isinstance(each, torch.Tensor)]
    roots: list[Any] = [each.grad_fn for each in tensors if each.grad_fn is not None]
    if not roots or tensors[0].grad_fn is None:
        return Loss(leaf=True)
    chain = _chain(roots[0], scales)
    (scale, scaler), penalty = _deeper(roots[0])
    if chain.scale is not None:
        scale, scaler = chain.scale, chain.scaler
    reduction = getattr(chain.end, "_saved_reduction", None)
    name = chain.end.name()
    return Loss(
        scale=scale,
        scaler=scaler,
        divisor=chain.divisor,
        mean=name.startswith("Mean") or reduction == 1,
        sums=name.startswith(("Add", "Sum", "Stack")),
        dtype=str(chain.dtype or tensors[0].dtype).removeprefix("torch."),
        hides_nan=chain.hides_nan,
        has_gradient=tensors[0].numel() > 1,
        penalty=penalty,
        leaf="AccumulateGrad" in name,
        in_part=_is_scaled_in_part([t.grad_fn for t in tensors if t.numel() == 1], scales),
    )


@dataclass
class _Chain:
    """The nodes of single values from the end of a graph to the first that computes something."""

    end: Any  # that node
    scale: float | None = None
    scaler: int | None = None
    divisor: float = 1.0
    dtype: torch.dtype | None = None  # the 16 bits that one of them was computed in
    hides_nan: bool = False


def _chain(node: Any, scales: Sequence[float]) -> _Chain:
    chain = _Chain(node)
    for _ in range(50):
        name = node.name()
        made_in = _dtype_of(node)
        if made_in in (torch.float16, torch.bfloat16):
            chain.dtype = made_in
        chain.hides_nan = chain.hides_nan or name.startswith("NanToNum")
        behind = _behind(node)
        if _SCALE in node.metadata:
            chain.scale, chain.scaler = node.metadata[_SCALE]
        elif name in _MULTIPLIES:
            number = _number_in(node)
            if not number:
                break
            if name == "MulBackward0" and chain.scale is None and number in scales:
                chain.scale, chain.scaler = number, [*scales].index(number)
            elif len(behind) == 1:
                chain.divisor *= number if name == "DivBackward0" else 1 / number
        elif not name.startswith(_HANDS_ON):
            if name in _ADDS and len(behind) > 1:
                # Another part may have a small weight besides.
                chain.divisor *= min(_chain(part, scales).divisor for part in behind)
            break
        if len(behind) != 1:
            break
        node = chain.end = behind[0]
    return chain


def _is_scaled_in_part(roots: Sequence[Any], scales: Sequence[float]) -> bool:
    """Whether some of what a backward adds up was multiplied by a scale, and some was not."""
    parts = [part for root in roots if root is not None for part in _parts(root)]
    if len(parts) < 2:
        return False
    scaled = [_chain(p, scales).scale is not None or _deeper(p)[0][0] is not None for p in parts]
    return any(scaled) and not all(scaled)


def _parts(root: Any) -> Iterator[Any]:
    """The nodes that a loss is a sum of; itself if it is none."""
    node, behind = root, _behind(root)
    while (
        len(behind) == 1
        and _SCALE not in node.metadata
        and (node.name() in _MULTIPLIES or node.name().startswith(_HANDS_ON))
    ):
        node, behind = behind[0], _behind(behind[0])
    if node.name() in _ADDS:
        for part in behind:
            yield from _parts(part)
    else:
        yield root


def _behind(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _dtype_of(node: Any) -> torch.dtype | None:
    inputs = getattr(node, "_input_metadata", None)  # torch 2.3 does not have it
    dtype: torch.dtype | None = inputs[0].dtype if inputs else node.metadata.get(_DTYPE)
    return dtype


def _number_in(node: Any) -> float | None:
    """The number that a node multiplies or divides by; None if it is a tensor."""
    for name in ("_saved_other", "_saved_self", "_saved_scalar"):
        with suppress(RuntimeError, AttributeError):
            value = getattr(node, name)
            if isinstance(value, (int, float)):
                return float(value)
            if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.requires_grad:
                return float(value)
    return None


def _deeper(root: Any) -> tuple[tuple[float | None, int | None], float | None]:
    """A scale anywhere in the graph and whose it is, and that of gradients not unscaled."""
    scale: tuple[float | None, int | None] = (None, None)
    gradients: float | None = None
    numbers: list[float] = []
    seen, waiting = {root}, [root]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if scale[0] is None:
            scale = node.metadata.get(_SCALE, scale)
        gradients = gradients or node.metadata.get(_GRADIENT)
        if _SCALE not in node.metadata and node.name().startswith(("Mul", "Div")):
            number = _number_in(node)
            if number:
                numbers.append(number)
        if _GRADIENT not in node.metadata:  # what is behind those is another graph
            behind = {*_behind(node)} - seen
            seen |= behind
            waiting += behind
    if gradients and any(
        abs(n * gradients - 1) < 1e-3 or abs(n / gradients - 1) < 1e-3 for n in numbers
    ):
        gradients = None  # divided by the scale
    return scale, gradients
