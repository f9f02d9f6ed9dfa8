"""Scores a loss scale without training, as the metric of a search.

The validation loss after a short training cannot rank loss scales, because seeds change it more
than scales inside the safe window do. Frozen parameters and identical batches make the score exact:

    loss_scale_score = gradient_error + 0.001 |backward_headroom_bits - 1.5|   nothing overflows
                     = 1 + 0.01 * halvings until nothing overflows             something does

`gradient_error` grows with what float16 flushes to 0, and is flat where nothing is flushed. There
the second term prefers one to two bits of headroom below 65520: among powers of two, one scale.
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
from determined_amp.finder.passes import Observation, Place, Prediction, cause_of, observe, predict

# The headroom that scores best, in bits.
_WANTED_HEADROOM = 1.5
_HEADROOM_WEIGHT = 1.0e-3
_HALVING_PENALTY = 1.0e-2

# If a smaller share of the values is left, nothing trains.
_FEWEST_VALUES = 0.01


@dataclass(frozen=True)
class Score:
    """The metrics of one loss scale; every value is finite.

    Args:
        loss_scale_score: Smaller is better; below 1 if and only if nothing overflows.
        gradient_error: Mean over parameter tensors and batches of min(1, relative 2-norm of the
            difference to the float32 gradient); 1 if something overflows.
        backward_headroom_bits: log2 of 65520 over the largest 16-bit gradient. If that overflows
            or everything is flushed to 0, the value that bfloat16 predicts.
        flushed_share: 2-norm of the 16-bit gradients that float16 flushed to 0, over that of all,
            in the tensor that loses most.
        overflow: 1 if a step with this scale is skipped, otherwise 0.
        halvings: How often the scale must be halved until nothing overflows.
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
    """Score the current scale of the trial's `GradScaler` on its first training batches.

    Args:
        trial: The trial; it cannot be used afterwards.
        context: Its context.
        batches: Number of training batches.

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
    """Score the loss scale 2^`scale_log2`; every rank of a distributed trial gets the same.

    Raises:
        determined.InvalidHP: if no loss scale helps.
        LossScaleError: if there is no gradient to scale.
    """
    prediction = predict(context, batches)
    prediction.require_gradients()
    seen = observe(context, batches, scale_log2, prediction)
    if seen.overflow:
        return _score_of_overflow(context, batches, seen, prediction)
    headroom = seen.backward_headroom_bits
    if not math.isfinite(headroom):  # everything is flushed, or an infinity reached no parameter
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
    context: Place, batches: Sequence[FrozenBatch], seen: Observation, prediction: Prediction
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
    except Exception as error:  # the trial's own code can raise anything on an unexpected dtype
        raise LossScaleError(
            f"this trial cannot run in float32, which gradient_error is measured against: {error}. "
            "Write .float() or .to(dtype) before what needs one dtype"
        ) from error
