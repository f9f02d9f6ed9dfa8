"""Scores a loss scale without training, as the metric of a search.

The validation loss after a short training cannot rank loss scales, because seeds change it more
than scales inside the safe window do. So the score is a distance in bits, and its chart is a V:

    loss_scale_score = |log2 of the scale - log2 of the scale to start with|

The scale to start with is the one the finder chooses, see `verdict.choice_of`. Every trial measures
for itself where float16 overflows. The score is exact, because the parameters are frozen and all
trials use the same batches.
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
from determined_amp.finder.verdict import FLUSHED_LIMIT, LARGEST_LOG2, choice_of

# If a smaller share of the values is left, nothing trains.
_FEWEST_VALUES = 0.01


@dataclass(frozen=True)
class Score:
    """The metrics of one loss scale; every value is finite.

    Args:
        loss_scale_score: Bits between the scale and the one to start with; smaller is better, and 0
            is best. A scale that overflows is that many bits too high.
        gradient_error: Mean over parameter tensors and batches of min(1, relative 2-norm of the
            difference from the float32 gradient); 1 if something overflows.
        backward_headroom_bits: log2(65520 / largest 16-bit gradient). If a gradient overflows or
            all are flushed to 0, the value that bfloat16 predicts.
        flushed_share: 2-norm of the 16-bit gradients that float16 flushed to 0, divided by the
            2-norm of all, in the tensor that loses most.
        overflow: 1 if a step with this scale is skipped, otherwise 0.
    """

    loss_scale_score: float
    gradient_error: float
    backward_headroom_bits: float
    flushed_share: float
    overflow: float


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
    """Score the loss scale 2^`scale_log2`; the score is the same on every rank.

    Raises:
        determined.InvalidHP: if no loss scale helps.
        LossScaleError: if there is no gradient to scale.
    """
    prediction = predict(context, batches)
    prediction.require_gradients()
    seen = observe(context, batches, scale_log2, prediction)
    headroom = seen.backward_headroom_bits
    # Not finite: everything was flushed, or an infinity reached no parameter.
    if seen.overflow or not math.isfinite(headroom):
        headroom = prediction.headroom_log2 - scale_log2
    top = _top(context, batches, seen, prediction)
    choice = choice_of(prediction.smallest_scale_log2(FLUSHED_LIMIT), top)
    error = 1.0
    if not seen.overflow:
        errors = [_gradient_error(batch, scale_log2) for batch in batches]
        slots = context.distributed.allgather(sum(errors) / len(errors))
        error = sum(slots) / len(slots)
    return Score(
        loss_scale_score=abs(scale_log2 - choice),
        gradient_error=error,
        backward_headroom_bits=min(headroom, 0.0) if seen.overflow else headroom,
        flushed_share=seen.flushed_share,
        overflow=float(seen.overflow),
    )


def _top(
    context: Place, batches: Sequence[FrozenBatch], seen: Observation, prediction: Prediction
) -> int:
    """log2 of the largest power of two at which nothing overflows: predicted, then measured.

    Raises:
        determined.InvalidHP: if no such scale leaves a gradient.
    """
    if seen.overflow and not observe(context, batches, 0, prediction).loss_is_finite:
        raise det.InvalidHP(f"no loss scale helps: {cause_of(context, batches)}")
    top = min(prediction.first_overflow_log2 - 1, LARGEST_LOG2)
    if seen.overflow:
        top = min(top, math.ceil(seen.scale_log2) - 1)
    # A kernel that accumulates in float16 overflows at smaller scales.
    while seen.overflow or top > seen.scale_log2:
        below = observe(context, batches, top, prediction)
        if not below.overflow:
            if seen.overflow and below.values_left < _FEWEST_VALUES:  # finite: nothing is left
                raise det.InvalidHP(f"no loss scale helps: {cause_of(context, batches)}")
            break
        top -= 1
    return top


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
