"""Records the magnitudes of the bfloat16 gradients of a backward, without keeping the
gradients.

In float16, activation gradients, and weight gradients before their cast to float32, can
overflow or be flushed to 0. `.grad` itself is float32 and does not show a flush. So the
recorder looks at what every node of the autograd graph hands on. These are gradients of
the loss, which move with the loss scale. The factors that a node multiplies them by,
such as the 3 x^2 of x^3, do not, and stay inside the node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler

from determined_amp.amp.patched import patched
from determined_amp.amp.rehearse.backward_graph import (
    BackwardGraph,
    Gradients,
    nodes_behind,
)
from determined_amp.amp.tensors import tensors_of, values_of
from determined_amp.finder.histogram import Histogram


class Source(NamedTuple):
    """The origin of a tensor in a backward; all steps of a recurrent net share it."""

    module: str
    operation: str  # name of autograd's node
    output: int  # index of the tensor among the node's results
    shape: tuple[int, ...]  # shape of the tensor, which tells activations from weights


class GradientRecorder(BackwardGraph):
    """Counts the bfloat16 gradients of a backward, by module and operation.

    It does not see what lies inside a kernel, such as the sums of fused attention, or
    the buckets of DistributedDataParallel.

    Args:
        models: The models whose modules name the sources.

    Attributes:
        histograms: Histograms by source, in the order of the backward.
        makes_float16: Whether any gradient was float16 instead.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models, self._record)
        self.histograms = defaultdict[Source, Histogram](Histogram)
        self.makes_float16 = False
        self._scaled: set[Any] = set()  # the nodes of scaled losses

    @contextmanager
    def watching(self) -> Iterator[None]:
        scale = GradScaler.scale

        def scale_and_note(scaler: GradScaler, outputs: Any) -> Any:
            scaled = scale(scaler, outputs)
            self._scaled.update(loss.grad_fn for loss in tensors_of(scaled))
            return scaled

        with super().watching(), patched(GradScaler, "scale", scale_and_note):
            yield
        self._scaled.clear()

    def is_followed(self, outputs: Any, *, accumulates: bool) -> bool:
        """Follow `torch.autograd.grad` only from a scaled output.

        Otherwise its gradients are a part of the loss, and belong to the forward.
        """
        return accumulates or not self._scaled.isdisjoint(nodes_behind(outputs))

    def _record(
        self, module: str, operation: str, made: Gradients, taken: Gradients
    ) -> None:
        known = {_storage(gradient) for gradient in taken if gradient is not None}
        for output, gradient in enumerate(made):
            # A view, or a gradient that is passed on unchanged, is counted already.
            if gradient is None or not gradient.numel() or _storage(gradient) in known:
                continue
            if gradient.dtype is torch.bfloat16:
                shape = () if gradient.is_nested else tuple(gradient.shape)
                source = Source(module, operation, output, shape)
                self.histograms[source] += Histogram.of(values_of(gradient))
            self.makes_float16 |= gradient.dtype is torch.float16


def _storage(tensor: torch.Tensor) -> int:
    return values_of(tensor).untyped_storage().data_ptr()
