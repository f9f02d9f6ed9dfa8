"""What float16 would do to a backward, predicted from one pass in bfloat16; and what it does.

bfloat16 autocast makes the same graph as float16 autocast and has the range of float32, and a loss
scale of 2^k moves every exponent by exactly k. So one backward tells, for every k, which values
overflow and which are flushed to 0. `observe` is the same in float16, one scale at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from determined import pytorch

from determined_amp.finder.frozen import FrozenBatch, LossScaleError
from determined_amp.finder.histogram import OVERFLOW_LOG2, Histogram
from determined_amp.finder.recorder import BackwardRecorder

# Magnitudes from here on are infinite in float16.
_FIRST_INFINITE = 65520.0


@dataclass(frozen=True)
class Prediction:
    """The 16-bit values of a few backwards without a loss scale.

    Args:
        modules: By module, in the order of the backward.
        largest: The largest magnitude of all.
    """

    modules: dict[str, Histogram]
    largest: float

    @property
    def total(self) -> Histogram:
        return sum(self.modules.values(), Histogram.empty())

    def require_gradients(self) -> None:
        """Raises: LossScaleError: if all values are 0, or one is not finite already."""
        if self.total.largest_log2 is None:
            raise LossScaleError(
                "all 16-bit gradients are exactly 0: the loss does not depend on the parameters, "
                "or an output layer that starts at 0 hides them. Train a few steps and start from "
                "their checkpoint (--checkpoint)"
            )
        if not self.total.is_finite:
            raise LossScaleError("the gradients are not finite in bfloat16, without a loss scale")

    @property
    def first_overflow_log2(self) -> int:
        """The smallest power of two at which a value becomes infinite.

        Raises:
            LossScaleError: if all values are 0, or one is not finite already.
        """
        self.require_gradients()
        largest = self.total.largest_log2
        assert largest is not None
        return OVERFLOW_LOG2 - largest

    @property
    def headroom_log2(self) -> float:
        """log2 of the largest factor, not only powers of two, that the gradients bear."""
        return math.log2(_FIRST_INFINITE / self.largest)

    def smallest_scale_log2(self, flushed: float) -> int:
        """The smallest power of two at which no more than that share of the values is flushed."""
        total = self.total
        scale = self.first_overflow_log2  # from here on down, the share can only grow
        while total.flushed_share(scale) > flushed:
            scale += 1
        while scale > -_FAR and total.flushed_share(scale - 1) <= flushed:
            scale -= 1
        return scale


# float32's whole range of exponents: beyond it no scale can be stored.
_FAR = 126


@dataclass(frozen=True)
class Observation:
    """What float16 did to the backwards of a few batches at one loss scale.

    Args:
        scale_log2: The loss scale was 2 to that power.
        loss_is_finite: Whether all losses were.
        overflow: Whether any parameter's gradient was not finite: `GradScaler` skips such a step.
        flushed_share: Share of the values that are not 0 in bfloat16 but were in float16.
        headroom_bits: log2 of 65520 over the largest 16-bit value; -inf if one is not finite.
    """

    scale_log2: float
    loss_is_finite: bool
    overflow: bool
    flushed_share: float
    headroom_bits: float


def predict(context: pytorch.PyTorchTrialContext, batches: Sequence[FrozenBatch]) -> Prediction:
    """One bfloat16 forward and backward of each batch, over all slots; same on every rank.

    Raises:
        LossScaleError: if a loss is not finite, or no backward makes a 16-bit tensor.
    """
    recorder = BackwardRecorder(context.models)
    finite = True
    for batch in batches:
        with recorder.recording():
            finite &= batch.backward(torch.bfloat16).loss_is_finite
    slots = context.distributed.allgather((finite, recorder.histograms(), recorder.largest()))
    if not all(finite for finite, _, _ in slots):
        raise LossScaleError(
            "the loss is not finite, although bfloat16 has the range of float32: look at the "
            "data and the parameters, not at the loss scale"
        )
    modules: dict[str, Histogram] = {}
    for _, histograms, _ in slots:
        for name, histogram in histograms.items():
            modules[name] = modules.get(name, Histogram.empty()) + histogram
    if not modules:
        raise LossScaleError(
            "no backward makes a 16-bit gradient: nothing here runs under float16 autocast. "
            "`python -m determined_amp audit CONFIG` shows what is computed in what"
        )
    return Prediction(modules, max(largest for _, _, largest in slots))


def observe(
    context: pytorch.PyTorchTrialContext,
    batches: Sequence[FrozenBatch],
    scale_log2: float,
    prediction: Prediction,
) -> Observation:
    """One float16 forward and backward of each batch, over all slots; same on every rank.

    Args:
        context: The trial's context.
        batches: The batches of `prediction`.
        scale_log2: The loss scale is 2 to that power.
        prediction: Tells which zeros are no underflow.
    """
    recorder = BackwardRecorder(context.models)
    loss_is_finite, gradients_are_finite = True, True
    for batch in batches:
        with recorder.recording():
            gradients = batch.backward(torch.float16, scale_log2)
        loss_is_finite &= gradients.loss_is_finite
        gradients_are_finite &= gradients.are_finite
    zeros = sum(histogram.zeros for histogram in recorder.histograms().values())
    here = (loss_is_finite, gradients_are_finite, zeros, recorder.largest())
    losses, finite, all_zeros, largest = zip(*context.distributed.allgather(here), strict=True)
    before = prediction.total
    flushed = max(0, sum(all_zeros) - before.zeros) / before.nonzero if before.nonzero else 0.0
    return Observation(
        scale_log2=scale_log2,
        loss_is_finite=all(losses),
        overflow=not all(finite),
        flushed_share=flushed,
        headroom_bits=_headroom(max(largest)),
    )


def _headroom(largest: float) -> float:
    return math.log2(_FIRST_INFINITE / largest) if 0 < largest < math.inf else -math.inf
