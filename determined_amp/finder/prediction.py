"""Predicts from one bfloat16 rehearsal what float16 does, and measures overflows.

bfloat16 autocast builds the same graph as float16 autocast, with the range of float32.
A loss scale of 2^k moves every exponent by exactly k. So one backward tells for every k
which gradients are flushed to 0, and roughly which overflow. Overflows are then
measured in float16, one scale at a time.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.rehearse.diagnosis import find_cause
from determined_amp.amp.rehearse.rehearsal import Rehearsal, Rehearsed
from determined_amp.amp.slots import Slots
from determined_amp.amp.tensors import SIXTEEN_BITS, dtype_name
from determined_amp.finder.gradient_recorder import GradientRecorder, Source
from determined_amp.finder.histogram import OVERFLOW_LOG2, Histogram

# float16 rounds this magnitude and larger ones to infinity.
_FIRST_INFINITE = 65520.0

_IN_FLOAT16 = (
    "write torch.autocast(device, dtype=torch.float16) around forward and loss, or "
    "leave the precision as it is: bfloat16 and float32 need no loss scale and no "
    "GradScaler"
)


class LossScaleError(UserError):
    """No loss scale can be found. The message says why, and what to do."""


@dataclass(frozen=True)
class Prediction:
    """The 16-bit gradients of a few backwards without a loss scale, by source."""

    # In the order of the backward. At least one value is not 0.
    tensors: dict[Source, Histogram]

    @cached_property
    def total(self) -> Histogram:
        return reduce(operator.add, self.tensors.values())

    @property
    def hidden_modules(self) -> tuple[str, ...]:
        """The modules whose gradients are all 0, in the order of the backward."""
        seen = {source.module for source, its in self.tensors.items() if its.nonzero}
        modules = dict.fromkeys(source.module for source in self.tensors)
        return tuple(module for module in modules if module not in seen)

    @property
    def first_overflow_log2(self) -> int:
        """log2 of the smallest power of two at which a value becomes infinite."""
        return OVERFLOW_LOG2 - math.floor(math.log2(self.total.largest))

    @property
    def headroom_log2(self) -> float:
        """log2 of the largest scale, of any value, at which nothing overflows."""
        return math.log2(_FIRST_INFINITE / self.total.largest)

    def flushed_share(self, scale_log2: float) -> float:
        """The largest share of any tensor that float16 flushes to 0 at a loss scale.

        A tensor's share is the norm of its flushed values divided by the norm of all
        its values. So near-zero values beside large ones hardly count. A tensor that is
        flushed completely has a share of 1, however small it is: the parameters behind
        it stop training.
        """
        return max(
            (h.flushed_share(scale_log2) for h in self.tensors.values()), default=0.0
        )

    def smallest_scale_log2(self, flushed: float) -> int:
        """log2 of the smallest power of two at which no share exceeds `flushed`."""
        return max(
            h.smallest_scale_log2(flushed) for h in self.tensors.values() if h.nonzero
        )


def predict_float16(rehearsals: Sequence[Rehearsal], slots: Slots) -> Prediction:
    """Rehearse each batch once in bfloat16; the result covers all slots.

    Raises:
        LossScaleError: if there is nothing to scale, or the trial cannot run in
            bfloat16.
    """
    problem, tensors = None, defaultdict[Source, Histogram](Histogram)
    try:
        _require_float32_parameters(rehearsals)
        tensors = _recorded_in_bfloat16(rehearsals)
    except LossScaleError as error:  # other slots wait for this one
        problem = str(error)
    every_slot = slots.allgather((problem, tensors))
    for problem, _ in every_slot:
        if problem is not None:
            raise LossScaleError(problem)
    (_, summed), *others = every_slot
    for _, more in others:
        for source, histogram in more.items():
            summed[source] += histogram
    prediction = Prediction(summed)
    if not prediction.total.nonzero:
        raise LossScaleError(
            "all 16-bit gradients are exactly 0: the loss does not depend on the "
            "parameters, or an output layer that starts at 0 hides them. Train a few "
            "steps and start from their checkpoint (--checkpoint)"
        )
    return prediction


def any_overflow_at(
    rehearsals: Sequence[Rehearsal], slots: Slots, scale_log2: float
) -> bool:
    """Whether a batch of any slot gives a gradient in float16 that is not finite.

    An error that float16 raises is the trial's own: training would raise it, too.
    """
    outcomes = [rehearsal.run(2.0**scale_log2) for rehearsal in rehearsals]
    return any(slots.allgather(any(outcome.lost for outcome in outcomes)))


def cause_of(
    rehearsals: Sequence[Rehearsal], slots: Slots, scale_log2: float = 0.0
) -> str:
    """The cause in the first batch that overflows at a scale; equal on every slot."""
    for rehearsal in rehearsals:
        cause = find_cause(rehearsal, slots, scale=2.0**scale_log2)
        if cause is not None:
            return cause
    return "its source was not found"


def _require_float32_parameters(rehearsals: Sequence[Rehearsal]) -> None:
    for model in rehearsals[0].models:
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.dtype in SIXTEEN_BITS:
                raise LossScaleError(
                    f"the model's parameters are {dtype_name(parameter.dtype)}, as "
                    "after .half() or .bfloat16(); a loss scale is for float32 "
                    "parameters under autocast: leave that call out, and write "
                    "torch.autocast(device, dtype=torch.float16) around forward and "
                    "loss"
                )


def _recorded_in_bfloat16(
    rehearsals: Sequence[Rehearsal],
) -> defaultdict[Source, Histogram]:
    """The histograms of this slot's batches."""
    recorder = GradientRecorder(rehearsals[0].models)
    for rehearsal in rehearsals:
        try:
            outcome = rehearsal.run(1.0, torch.bfloat16, watch=recorder.watching())
        except UserError:
            raise
        except Exception as error:
            rehearsal.run(1.0)  # an error that float16 raises, too, is the trial's own
            raise LossScaleError(
                "this trial runs in float16, but not in bfloat16, which the finder "
                f"needs: {type(error).__name__}: {one_line(error)}. Write .float() "
                "before what has no bfloat16, as in logits.float().cpu().numpy()"
            ) from error
        _check(outcome)
    if recorder.makes_float16:
        raise LossScaleError(
            "this trial makes float16 tensors outside autocast, so that bfloat16 "
            "cannot stand for float16 in the finder; leave .half() and "
            ".to(torch.float16) out"
        )
    if not recorder.histograms:
        raise LossScaleError(
            f"no backward makes a 16-bit gradient in autocast: {_IN_FLOAT16}"
        )
    return recorder.histograms


def _check(outcome: Rehearsed) -> None:
    """Raise if the outcome of a rehearsal in bfloat16 says nothing about float16."""
    if not outcome.has_gradients:
        raise LossScaleError("no parameter gets a gradient: there is nothing to scale")
    if not outcome.loss_is_finite:
        raise LossScaleError(
            "the loss is not finite, although bfloat16 has the range of float32: look "
            "at the data and the parameters, not at the loss scale"
        )
    if outcome.lost:
        raise LossScaleError(
            "the gradients are not finite in bfloat16, without a loss scale"
        )
    if not outcome.uses_float16:
        raise LossScaleError(f"no forward runs under float16 autocast: {_IN_FLOAT16}")
