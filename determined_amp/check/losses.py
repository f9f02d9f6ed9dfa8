"""Reads in the graph of a loss how it was made: scaled, divided, with gradients in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from determined_amp.amp.tensors import tensors_of

# In the metadata of a node: the scale and the number of its scaler, the dtype of what was scaled,
# and the scale of a gradient.
_SCALE, _DTYPE = "determined_amp.scale", "determined_amp.dtype_of_loss"
_GRADIENT = "determined_amp.gradient_of_scaled"
# Nodes that hand on a single value.
_HANDS_ON = ("ToCopy", "NanToNum", "View", "Squeeze", "Unsqueeze", "Clone", "Alias", "Reshape")
# No graph is read further than this.
_MOST_NODES = 20_000


@dataclass(frozen=True)
class Loss:
    """How a loss was made."""

    scale: float | None = None  # what a `GradScaler` multiplied it by, or a part of it
    scaler: int | None = None  # the number of that scaler
    unscaled: bool = False  # parameters are reached past all scales
    divisor: float = 1.0  # what it was divided by, apart from the scale
    mean: bool = False  # what was divided is a mean
    dtype: str = "float32"  # what it is in
    has_gradient: bool = False  # it is several numbers, so the backward begins with a gradient
    penalty: float | None = None  # scale of gradients that are a part of it and were not unscaled
    leaf: bool = False  # it was not computed from anything


@dataclass
class _Graph:
    """What is behind a loss."""

    scales: list[tuple[float, int | None]] = field(default_factory=list)
    unscaled: bool = False
    gradients: list[float] = field(default_factory=list)  # the scales of those in it
    numbers: list[float] = field(default_factory=list)  # by which is multiplied or divided


def mark(scaled: Any, losses: Any, scale: float, scaler: int) -> None:
    """Remember in the graph that these tensors are losses that were scaled, and their dtype."""
    for each, loss in zip(tensors_of(scaled), tensors_of(losses), strict=True):
        node: Any = each.grad_fn
        if node is not None:
            node.metadata[_SCALE], node.metadata[_DTYPE] = (scale, scaler), loss.dtype


def mark_gradients(gradients: Any, scale: float | None) -> None:
    """Remember in the graph that these are gradients of a scaled loss."""
    for gradient in tensors_of(gradients):
        node: Any = gradient.grad_fn
        if scale and node is not None:
            node.metadata[_GRADIENT] = scale


def loss_of(outputs: Any, scales: Sequence[float]) -> Loss:
    """How the first of the tensors that a backward begins at was made.

    Args:
        outputs: The tensors.
        scales: The present scale of each scaler, by which a training may multiply itself.
    """
    tensors = [*tensors_of(outputs)]
    root: Any = tensors[0].grad_fn if tensors else None
    if root is None:
        return Loss(leaf=True)
    graph = _graph_behind([each.grad_fn for each in tensors if each.grad_fn is not None], scales)
    scale, scaler = graph.scales[0] if graph.scales else (None, None)
    # What is multiplied or divided by the scale is unscaled.
    penalties = [
        each
        for each in graph.gradients
        if not any(abs(number / each - 1) < 1e-3 for number in graph.numbers)
    ]
    divisor, made_by = _divisor_of(root, scales)
    name = made_by.name()
    return Loss(
        scale,
        scaler,
        graph.unscaled,
        divisor,
        mean=name.startswith("Mean") or getattr(made_by, "_saved_reduction", None) == 1,
        dtype=str(root.metadata.get(_DTYPE, tensors[0].dtype)).removeprefix("torch."),
        has_gradient=tensors[0].numel() > 1,
        penalty=penalties[0] if penalties else None,
        leaf="AccumulateGrad" in name,
    )


def _graph_behind(roots: list[Any], scales: Sequence[float]) -> _Graph:
    graph = _Graph()
    waiting = [(root, False) for root in roots]
    seen = {*waiting}
    while waiting and len(seen) < _MOST_NODES:
        node, is_scaled = waiting.pop()
        mark, number = node.metadata.get(_SCALE), _number_in(node)
        if mark is None and number and number in scales and node.name() == "MulBackward0":
            mark = number, [*scales].index(number)
        if mark is not None:
            graph.scales += [] if is_scaled else [mark]
            is_scaled = True
        elif number:
            graph.numbers += [number, 1 / number]
        graph.unscaled = graph.unscaled or ("AccumulateGrad" in node.name() and not is_scaled)
        if _GRADIENT in node.metadata:  # what is behind it is another graph
            graph.gradients.append(node.metadata[_GRADIENT])
            continue
        behind = {(each, is_scaled) for each in _behind(node)} - seen
        seen |= behind
        waiting += behind
    return graph


def _divisor_of(node: Any, scales: Sequence[float]) -> tuple[float, Any]:
    """What a loss was divided by, apart from its scale, and the node of what was divided."""
    divisor, behind = 1.0, _behind(node)
    while len(behind) == 1:
        number = _number_in(node)
        if number and _SCALE not in node.metadata and number not in scales:
            divisor *= number if node.name().startswith("Div") else 1 / number
        elif not (number or node.name().startswith(_HANDS_ON)):
            break
        node, behind = behind[0], _behind(behind[0])
    return divisor, node


def _behind(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _number_in(node: Any) -> float | None:
    """The number that a node multiplies or divides by; None if it is a tensor."""
    for name in ("_saved_other", "_saved_self") if node.name().startswith(("Mul", "Div")) else ():
        with suppress(RuntimeError, AttributeError):  # freed, or not there, or None
            value = getattr(node, name)
            is_number = isinstance(value, (int, float))
            if is_number or (value.numel() == 1 and not value.requires_grad):
                return float(value)
    return None
