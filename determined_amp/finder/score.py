"""Scores a loss scale without training, as the metric of a search: what does the scale cost?

The validation loss after a short training cannot rank loss scales, because seeds change it more
than scales inside the safe window do. So the score counts the optimizer steps that a scale loses:

    steps_lost       = skipped steps + lost share of the gradient * growth_interval
    loss_scale_score = log2(1 + steps_lost)

A skipped step lowers the scale, and the first steps are skipped until nothing overflows. The lost
share is what float16 flushes to 0 at the scale that the training then starts with; it counts where
it is above `FLUSHED_LIMIT`, and until the scale grows. So the score is 0 all through the safe
window, and rises on both sides of it.

All of this is measured in float16. One pass in bfloat16 tells which values there are to be flushed;
what it predicts of overflow is not asked. The score is exact, because the parameters are frozen and
all trials use the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import determined as det
import torch

from determined_amp.amp.errors import UserError
from determined_amp.finder.frozen import FrozenBatch, Gradients, LossScaleError
from determined_amp.finder.passes import Observation, Place, cause_of, observe, predict
from determined_amp.finder.score_metrics import Score
from determined_amp.finder.verdict import DEFAULT_LOG2, FLUSHED_LIMIT

# If a smaller share of the values is left, nothing trains.
_FEWEST_VALUES = 0.01

# The smallest normal float32. A smaller loss scale has fewer bits, and soon is 0.
_LEAST_SCALE = 2.0**-126


def steps_lost(skipped: int, flushed_share: float, growth_interval: int) -> float:
    """Optimizer steps that a loss scale loses, see `Score`."""
    return skipped + (flushed_share * growth_interval if flushed_share > FLUSHED_LIMIT else 0.0)


def score_of(steps: float) -> float:
    """The score of a loss scale that loses so many steps."""
    return math.log2(1.0 + steps)


def bits_from_default(scale_log2: float) -> float:
    """How far a scale is from PyTorch's default: the order of trials with equal scores.

    Infinite for NaN, a scale that is not known.
    """
    return math.inf if math.isnan(scale_log2) else abs(scale_log2 - DEFAULT_LOG2)


def worth_of_best(metric: str | None, trials: Sequence[tuple[float, float | None]]) -> str | None:
    """A sentence on what the best of a search's scored trials means.

    Args:
        metric: What the search ranks its trials by.
        trials: log2 of the loss scale of each, and how many steps it lost.

    Returns:
        None with fewer than two trials, with another metric than the score, or if one of them
        does not tell its loss scale and its lost steps.
    """
    if metric != "loss_scale_score" or len(trials) < 2:
        return None
    known = [(scale, lost) for scale, lost in trials if lost is not None and math.isfinite(scale)]
    if len(known) < len(trials):
        return None
    free = [scale for scale, lost in known if lost == 0]
    if not free:
        fewest = min(lost for _, lost in known)
        return f"every scale of this search loses steps, and the best one {fewest:.4g}"
    return (
        f"no step is lost in {len(free)} of {len(trials)} trials, at 2^{min(free):g} to "
        f"2^{max(free):g}: a search can find nothing better. The best trial is the one of these "
        f"that is nearest to PyTorch's default, 2^{DEFAULT_LOG2}"
    )


def score_batches(
    context: Place,
    batches: Sequence[FrozenBatch],
    scale_log2: float,
    *,
    growth_interval: int = 2000,
    backoff_factor: float = 0.5,
    min_scale: float = 0.0,
) -> Score:
    """Score the loss scale 2^`scale_log2`; the score is the same on every rank.

    Args:
        context: The models and processes of the passes.
        batches: Training batches.
        scale_log2: log2 of the initial loss scale.
        growth_interval: Applied steps in a row before the scale grows.
        backoff_factor: Multiplies the scale after a skipped step.
        min_scale: The lower limit of the scale.

    Raises:
        determined.InvalidHP: if no loss scale helps.
        LossScaleError: if there is no gradient to scale.
    """
    prediction = predict(context, batches)
    prediction.require_gradients()
    bits_per_skip = -math.log2(backoff_factor)
    least_log2 = min(math.log2(max(min_scale, _LEAST_SCALE)), scale_log2)

    def after(skipped: int) -> Observation:
        at = max(scale_log2 - skipped * bits_per_skip, least_log2)
        return observe(context, batches, at, prediction)

    to_one = math.ceil(scale_log2 / bits_per_skip)
    most = math.ceil((scale_log2 - least_log2) / bits_per_skip)
    skipped, seen = _until_applied(after, to_one, most, bits_per_skip)
    if seen.overflow and seen.loss_is_finite and min_scale > _LEAST_SCALE:
        raise det.InvalidHP(
            f"no loss scale helps from 2^{least_log2:g} up, which is amp.min_scale: steps overflow "
            "even there; allowed: a smaller min_scale"
        )
    if seen.overflow or (skipped and seen.values_left < _FEWEST_VALUES):
        raise det.InvalidHP(f"no loss scale helps: {cause_of(context, batches)}")
    headroom = seen.backward_headroom_bits + seen.scale_log2 - scale_log2
    # Not finite: everything was flushed, or an infinity reached no parameter.
    if not math.isfinite(headroom):
        headroom = prediction.headroom_log2 - scale_log2
    steps = steps_lost(skipped, seen.flushed_share, growth_interval)
    return Score(
        init_scale_log2=scale_log2,
        loss_scale_score=score_of(steps),
        steps_lost=steps,
        gradient_error=1.0 if skipped else _gradient_error(context, batches, scale_log2),
        backward_headroom_bits=min(headroom, 0.0) if skipped else headroom,
        flushed_share=seen.flushed_share,
        overflow=float(skipped > 0),
    )


def _until_applied(
    after: Callable[[int], Observation], to_one: int, most: int, bits_per_skip: float
) -> tuple[int, Observation]:
    """The number of steps skipped until nothing overflows, and the measurement then.

    What overflows at a scale overflows at every larger one. So the search jumps to a small scale,
    back by the room that is measured there, and confirms. Bisection does the rest, for instance
    with a kernel that adds up in float16 and overflows before its result does.

    Args:
        after: Measures the scale that is left after so many skipped steps.
        to_one: Skipped steps until the scale is 1 or less.
        most: Skipped steps until the scale cannot get smaller.
        bits_per_skip: What a skipped step takes from the scale.

    Returns:
        With an overflow if that never ends.
    """
    skipped, seen = 0, after(0)
    if not seen.overflow or not most:
        return skipped, seen
    overflows, skipped = 0, min(max(to_one, 1), most)
    seen = after(skipped)
    # A loss that is not finite at a scale of 1 or less is not finite without a scale, either.
    if seen.overflow and seen.loss_is_finite and skipped < most:
        overflows, skipped = skipped, most
        seen = after(skipped)
    if seen.overflow:
        return skipped, seen
    jumps = 2  # the second confirms the first
    while skipped - overflows > 1:
        room = seen.backward_headroom_bits / bits_per_skip
        if jumps and math.isfinite(room):
            jumps -= 1
            tried = min(max(skipped - math.floor(room), overflows + 1), skipped - 1)
        else:  # or all gradients were flushed, which says nothing about the room
            tried = (overflows + skipped) // 2
        observation = after(tried)
        if observation.overflow:
            overflows = tried
        else:
            skipped, seen = tried, observation
    return skipped, seen


def _gradient_error(context: Place, batches: Sequence[FrozenBatch], scale_log2: float) -> float:
    """The mean over all batches of all slots, see `Score`."""

    def of(batch: FrozenBatch) -> float:
        exact = _in_float32(batch).parameters
        scaled = batch.backward(torch.float16, scale_log2).parameters
        errors = []
        for reference, gradient in zip(exact, scaled, strict=True):
            norm = reference.double().norm()
            difference = (gradient.double() / 2.0**scale_log2 - reference.double()).norm()
            errors.append(torch.where(norm > 0, (difference / norm).clamp(max=1.0), norm))
        return float(torch.stack(errors).mean())

    slots = context.distributed.allgather(sum(map(of, batches)) / len(batches))
    return float(sum(slots) / len(slots))


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
