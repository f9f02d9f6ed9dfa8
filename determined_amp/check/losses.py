"""Reads in the graph of a loss how it was made: scaled, or with gradients in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.tensors import dtype_name, tensors_of

# In the metadata of a node: what is known of the tensor that it made.
_KNOWN = "determined_amp.check"
# No graph is read further than this.
_MOST_NODES = 20_000


@dataclass
class Loss:
    """How a loss was made."""

    scale: float | None = None  # what a `GradScaler` multiplied it by, or a part of it
    unscaled: bool = False  # parameters are reached past all scales
    factor: float = 1.0  # what it was multiplied by last, perhaps by that
    dtype: str = "float32"  # what it is in
    has_gradient: bool = (
        False  # it is several numbers, so the backward begins with a gradient
    )
    trains: bool = False  # parameters are behind it
    # The scale of gradients that are a part of it, and were not unscaled.
    penalty: float | None = None


def mark(tensors: Any, **known: Any) -> None:
    """Remember in the graph what is known of tensors.

    Args:
        tensors: The tensors, in any containers.
        known: The `scale` of losses that were scaled, and the `dtype` of what was
            scaled, or the scale of the loss that they are a `gradient` of, 1 without.
    """
    for tensor in tensors_of(tensors):
        node: Any = tensor.grad_fn
        if node is None:  # of a validation
            setattr(tensor, _KNOWN, known)
        else:
            node.metadata[_KNOWN] = known


def was_scaled(tensor: torch.Tensor) -> bool:
    """Whether a scaler has made it."""
    node = tensor.grad_fn
    known = getattr(tensor, _KNOWN, {}) if node is None else _known_of(node)
    return "scale" in known


def loss_of(outputs: Any, scales: Sequence[float]) -> Loss:
    """How the tensors that a backward begins at were made.

    Args:
        outputs: The tensors.
        scales: The present scale of each scaler, by which a training may multiply
            itself.
    """
    tensors = [each for each in tensors_of(outputs) if each.grad_fn is not None]
    if not tensors:
        return Loss()
    roots: list[Any] = [each.grad_fn for each in tensors]
    loss = Loss(has_gradient=tensors[0].numel() > 1)
    loss.dtype = dtype_name(_known_of(roots[0]).get("dtype", tensors[0].dtype))
    _read_graph(loss, roots, scales)
    loss.factor = _factor_before(roots[0])
    return loss


def _read_graph(loss: Loss, roots: list[Any], scales: Sequence[float]) -> None:
    """Find what multiplies a loss or parts of it."""
    gradients: list[float] = []
    numbers = [1.0]
    waiting: list[tuple[Any, float | None]] = [(root, None) for root in roots]
    seen = {*waiting}
    while waiting and len(seen) < _MOST_NODES:
        node, factor = waiting.pop()
        known, name = _known_of(node), node.name()
        if "gradient" in known:  # what is behind it is another graph
            gradients.append(known["gradient"])
            continue
        scale, number = known.get("scale"), _number_in(node)
        # By hand; what a scaler has scaled may have such a factor by chance.
        if name == "MulBackward0" and number in scales and factor is None:
            scale = scale or number
        if scale:
            factor = scale * (factor or 1.0)
            loss.scale = max(loss.scale or factor, factor)
        elif number:
            numbers.append(max(number, 1 / number))
        if "AccumulateGrad" in name:
            loss.unscaled = loss.unscaled or factor is None
            loss.trains = loss.trains or isinstance(node.variable, torch.nn.Parameter)
        behind = {(each, factor) for each in _behind(node)} - seen
        seen |= behind
        waiting += behind
    # What is multiplied or divided by the scale is unscaled.
    for gradient in gradients:
        if not any(math.isclose(number, gradient, rel_tol=1e-3) for number in numbers):
            loss.penalty = gradient


def _factor_before(node: Any) -> float:
    """What a loss was multiplied by last, as by a fixed scale."""
    factor = 1.0
    while number := _number_in(node):
        factor *= 1 / number if node.name().startswith("Div") else number
        (node,) = _behind(node)
    return factor


def _known_of(node: Any) -> dict[str, Any]:
    known: dict[str, Any] = node.metadata.get(_KNOWN, {})
    return known


def _behind(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _number_in(node: Any) -> float | None:
    """The number that a node multiplies or divides by; None if it is a tensor."""
    for name in (
        ("_saved_other", "_saved_self")
        if node.name().startswith(("Mul", "Div"))
        else ()
    ):
        with suppress(RuntimeError, AttributeError):  # freed, or not there
            value = torch.as_tensor(getattr(node, name))
            if value.numel() == 1 and not value.requires_grad:
                return float(value)
    return None
