"""One number for one loss scale, measured without training: a sound metric for a search.

The validation loss after a short training cannot rank loss scales: inside the safe window they
differ by less than seeds do. From frozen parameters and identical batches the answer is exact:

    loss_scale_score = gradient_error + 0.001 |backward_headroom_bits - 1.5|   nothing overflows
                     = 1 + 0.01 * halvings until nothing overflows             something does

`gradient_error` punishes what float16 flushes to 0; it is flat where nothing is. There the second
term decides for one to two bits of room under 65520, which on powers of two is one scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import determined as det
import torch
from determined import pytorch

from determined_amp.config.errors import UserError
from determined_amp.finder.frozen import (
    FrozenBatch,
    Gradients,
    LossScaleError,
    in_training,
    wrapped_scaler,
)
from determined_amp.finder.passes import (
    Observation,
    Place,
    Prediction,
    cause_of,
    observe,
    predict,
)

# Bits of room under float16's largest value that the search steers for.
_WANTED_HEADROOM = 1.5
_HEADROOM_WEIGHT = 1.0e-3
_HALVING_PENALTY = 1.0e-2

# A scale that leaves fewer values than this trains nothing.
_FEWEST_VALUES = 0.01


@dataclass(frozen=True)
class Score:
    """What is reported for one loss scale; every value is finite.

    Args:
        loss_scale_score: Smaller is better; below 1 if and only if nothing overflows.
        gradient_error: Mean over parameter tensors and batches of min(1, relative 2-norm of the
            difference to the float32 gradient); 1 if something overflows.
        backward_headroom_bits: log2 of 65520 over the largest 16-bit gradient. What bfloat16
            predicts where that overflows, which makes it negative, or where all is flushed to 0.
        flushed_share: 2-norm of the 16-bit gradients that float16 made 0, over that of all, in
            the tensor that suffers most.
        overflow: 1 if a step with this scale is skipped, otherwise 0.
        halvings: Of the scale until nothing overflows.
    """

    loss_scale_score: float
    gradient_error: float
    backward_headroom_bits: float
    flushed_share: float
    overflow: float
    halvings: float


def score(
    trial: pytorch.PyTorchTrial, context: pytorch.PyTorchTrialContext, batches: int
) -> dict[str, float]:
    """Measure the current scale of the trial's `GradScaler` on its first training batches.

    Determined's loop starts, and ends before a step is taken: the trial has been used up then.

    Args:
        trial: The trial.
        context: Its context.
        batches: Training batches to measure on.

    Returns:
        The fields of `Score`.

    Raises:
        determined.InvalidHP: if no loss scale helps, because the forward overflows.
        LossScaleError: if the trial scales no loss, or has no gradient to scale.
    """
    scale_log2 = math.log2(wrapped_scaler(context).get_scale())

    def measure(frozen: Sequence[FrozenBatch]) -> Score:
        return score_batches(context, frozen, scale_log2)

    return asdict(in_training(trial, context, batches, measure))


def score_batches(context: Place, batches: Sequence[FrozenBatch], scale_log2: float) -> Score:
    """`score` of one scale; every rank of a distributed trial gets the same.

    Raises:
        determined.InvalidHP: if no loss scale helps.
    """
    prediction = predict(context, batches)
    prediction.require_gradients()
    seen = observe(context, batches, scale_log2, prediction)
    if seen.overflow:
        return _score_of_overflow(context, batches, seen, prediction)
    headroom = seen.backward_headroom_bits
    if not math.isfinite(headroom):  # all is flushed, or an infinity reached no parameter
        headroom = prediction.headroom_log2 - scale_log2
    errors = [_gradient_error(batch, scale_log2) for batch in batches]
    slots = context.distributed.allgather(sum(errors) / len(errors))
    error = sum(slots) / len(slots)
    return Score(
        loss_scale_score=error + _HEADROOM_WEIGHT * abs(headroom - _WANTED_HEADROOM),
        gradient_error=error,
        backward_headroom_bits=headroom,
        flushed_share=seen.flushed_share,
        overflow=0.0,
        halvings=0.0,
    )


def _score_of_overflow(
    context: Place,
    batches: Sequence[FrozenBatch],
    seen: Observation,
    prediction: Prediction,
) -> Score:
    if not observe(context, batches, 0, prediction).loss_is_finite:
        raise det.InvalidHP(f"no loss scale helps: {cause_of(context, batches)}")
    scale = seen.scale_log2
    halvings = max(1, math.ceil(scale - prediction.headroom_log2))
    while (below := observe(context, batches, scale - halvings, prediction)).overflow:
        halvings += 1
    if below.values_left < _FEWEST_VALUES:  # finite only because nothing is left
        raise det.InvalidHP(f"no loss scale helps: {cause_of(context, batches)}")
    return Score(
        loss_scale_score=1.0 + _HALVING_PENALTY * halvings,
        gradient_error=1.0,
        backward_headroom_bits=min(prediction.headroom_log2 - scale, 0.0),
        flushed_share=seen.flushed_share,
        overflow=1.0,
        halvings=float(halvings),
    )


def _gradient_error(batch: FrozenBatch, scale_log2: float) -> float:
    exact = _in_float32(batch).parameters
    scaled = batch.backward(torch.float16, scale_log2).parameters
    errors = []
    for reference, gradient in zip(exact, scaled, strict=True):
        norm = reference.double().norm()
        difference = (gradient.double() / 2.0**scale_log2 - reference.double()).norm()
        errors.append(torch.where(norm > 0, (difference / norm).clamp(max=1.0), norm))
    return float(torch.stack(errors).mean())


def _in_float32(batch: FrozenBatch) -> Gradients:
    try:
        return batch.backward(None)
    except UserError:
        raise
    except Exception as error:  # whatever the trial's own code does to a dtype
        raise LossScaleError(
            f"this trial cannot run in float32, which gradient_error is measured against: {error}. "
            "Write .float() or .to(dtype) before what needs one dtype"
        ) from error
