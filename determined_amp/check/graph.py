"""Reads in the graph of a loss how it was made: scaled, divided, in 16 bits."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.tensors import tensors_of

_SCALE, _DTYPE = "determined_amp.scale", "determined_amp.dtype_of_loss"
_GRADIENT = "determined_amp.gradient_of_scaled"
# Nodes that hand on a single value.
_HANDS_ON = ("ToCopy", "NanToNum", "View", "Squeeze", "Unsqueeze", "Clone", "Alias", "Reshape")
# No graph is read further than this.
_MOST_NODES = 20_000


@dataclass(frozen=True)
class Loss:
    """How a loss was made."""

    scale: float | None = None  # what a `GradScaler` multiplied it by
    divisor: float = 1.0  # what it was divided by, apart from the scale
    mean: bool = False  # what was divided is a mean
    sums: bool = False  # what was divided is a sum of several losses
    dtype: str = "float32"  # what it was computed in
    hides_nan: bool = False  # `nan_to_num` was applied to it
    has_gradient: bool = False  # it is several numbers, so the backward begins with a gradient
    penalty: float | None = None  # scale of gradients that are a part of it and were not unscaled


def mark(scaled: Any, losses: Any, scale: float) -> None:
    """Remember in the graph that these tensors are losses that were scaled, and their dtype."""
    for each, loss in zip(tensors_of(scaled), tensors_of(losses), strict=True):
        node: Any = each.grad_fn
        if node is not None:
            node.metadata[_SCALE], node.metadata[_DTYPE] = scale, loss.dtype


def mark_gradients(gradients: Any, scale: float | None) -> None:
    """Remember in the graph that these are gradients of a scaled loss."""
    for gradient in gradients if scale else ():
        if gradient is not None and gradient.grad_fn is not None:
            gradient.grad_fn.metadata[_GRADIENT] = scale


def loss_of(outputs: Any) -> Loss:
    """How the first of the tensors that a backward begins at was made."""
    tensor = next((each for each in outputs if isinstance(each, torch.Tensor)), None)
    if tensor is None or tensor.grad_fn is None:
        return Loss()
    scale, divisor, dtype, hides = None, 1.0, tensor.dtype, False
    node: Any = tensor.grad_fn
    name = ""
    for _ in range(50):
        name = node.name()
        made_in = _dtype_of(node)
        dtype = made_in if made_in in (torch.float16, torch.bfloat16) else dtype
        hides = hides or name.startswith("NanToNum")
        behind = [next_node for next_node, _ in node.next_functions if next_node is not None]
        factor = 1.0
        if _SCALE in node.metadata:
            scale = node.metadata[_SCALE]
        elif name in ("MulBackward0", "DivBackward0"):
            number = _number_in(node)
            if not number:
                break
            factor = number if name == "DivBackward0" else 1 / number
        elif not name.startswith(_HANDS_ON):
            break
        if len(behind) != 1:
            break
        divisor, node = divisor * factor, behind[0]
    reduction = getattr(node, "_saved_reduction", None)
    scales, penalty = _deeper(tensor.grad_fn)
    return Loss(
        scale=scale if scale is not None else scales,
        divisor=divisor,
        mean=name.startswith("Mean") or reduction == 1,
        sums=name.startswith(("Add", "Sum", "Stack")),
        dtype=str(dtype).removeprefix("torch."),
        hides_nan=hides,
        has_gradient=tensor.numel() > 1,
        penalty=penalty,
    )


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


def _deeper(root: Any) -> tuple[float | None, float | None]:
    """A scale anywhere in the graph, and that of gradients which were not unscaled."""
    scale: float | None = None
    gradients: float | None = None
    numbers: list[float] = []
    seen, waiting = {root}, [root]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        scale = scale or node.metadata.get(_SCALE)
        gradients = gradients or node.metadata.get(_GRADIENT)
        if _SCALE not in node.metadata and node.name().startswith(("Mul", "Div")):
            number = _number_in(node)
            if number:
                numbers.append(number)
        if _GRADIENT not in node.metadata:  # what is behind those is another graph
            behind = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= behind
            waiting += behind
    if gradients and any(
        abs(n * gradients - 1) < 1e-3 or abs(n / gradients - 1) < 1e-3 for n in numbers
    ):
        gradients = None  # divided by the scale
    return scale, gradients
