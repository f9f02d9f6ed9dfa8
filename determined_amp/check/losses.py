"""Reads from the autograd graph how a loss was made: by which scale, from what.

The recorder marks what scalers and `torch.autograd.grad` return, with `mark`. At a
backward it calls `loss_of`, which walks the graph from the loss to the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.tensors import dtype_name, tensors_of

# The key in a node's metadata for what is known of the tensor that the node made.
_KNOWN = "determined_amp.check"
# The largest number of nodes that are read of one graph.
_MOST_NODES = 20_000


@dataclass
class Loss:
    """How a loss was made."""

    scale: float | None = None  # the loss scale of it or of a part
    unscaled: bool = False  # whether a path to the parameters has no scale
    factor: float = 1.0  # the number that it was multiplied by last
    dtype: str = "float32"  # its dtype before it was scaled
    has_gradient: bool = (
        False  # it is several numbers, so the backward begins with a gradient
    )
    trains: bool = False  # whether it depends on parameters


def mark(tensors: Any, **known: Any) -> None:
    """Note in the graph what is known of tensors.

    Args:
        tensors: The tensors, in any containers.
        known: For scaled losses, the `scale` and the `dtype` before scaling. For
            gradients, `gradient`.
    """
    for tensor in tensors_of(tensors):
        node: Any = tensor.grad_fn
        if node is None:  # no graph, as in a validation
            setattr(tensor, _KNOWN, known)
        else:
            node.metadata[_KNOWN] = known


def was_scaled(tensor: torch.Tensor) -> bool:
    """Whether a scaler made this tensor."""
    node = tensor.grad_fn
    known = getattr(tensor, _KNOWN, {}) if node is None else _known_of(node)
    return "scale" in known


def loss_of(outputs: Any, scales: Sequence[float]) -> Loss:
    """How the tensors at which a backward begins were made.

    Args:
        outputs: The tensors.
        scales: The current scale of each scaler. A training may multiply a loss by one
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
    """Find the scales of a loss or of its parts, and the parameters behind it."""
    waiting: list[tuple[Any, float | None]] = [(root, None) for root in roots]
    seen = {*waiting}
    while waiting and len(seen) < _MOST_NODES:
        node, factor = waiting.pop()
        known, name = _known_of(node), node.name()
        if "gradient" in known:  # the graph behind it is that of another loss
            continue
        scale, number = known.get("scale"), _number_in(node)
        # The training scales by hand. Behind a scaler's scale, such a factor is chance.
        if name == "MulBackward0" and number in scales and factor is None:
            scale = scale or number
        if scale:
            factor = scale * (factor or 1.0)
            loss.scale = max(loss.scale or factor, factor)
        if "AccumulateGrad" in name:
            loss.unscaled = loss.unscaled or factor is None
            loss.trains = loss.trains or isinstance(node.variable, torch.nn.Parameter)
        behind = {(each, factor) for each in _behind(node)} - seen
        seen |= behind
        waiting += behind


def _factor_before(node: Any) -> float:
    """The product of the numbers that a loss was multiplied by last."""
    factor = 1.0
    while number := _number_in(node):
        factor *= 1 / number if node.name().startswith("Div") else number
        (node,) = _behind(node)
    return factor


def _known_of(node: Any) -> dict[str, Any]:
    """What is known of the tensor that a node made."""
    known: dict[str, Any] = node.metadata.get(_KNOWN, {})
    return known


def _behind(node: Any) -> list[Any]:
    """The nodes that a node's tensor was computed from."""
    return [each for each, _ in node.next_functions if each is not None]


def _number_in(node: Any) -> float | None:
    """The number that a node multiplies or divides by; None if there is none."""
    for name in (
        ("_saved_other", "_saved_self")
        if node.name().startswith(("Mul", "Div"))
        else ()
    ):
        with suppress(RuntimeError, AttributeError):  # freed, or another node
            value = torch.as_tensor(getattr(node, name))
            if value.numel() == 1 and not value.requires_grad:
                return float(value)
    return None
