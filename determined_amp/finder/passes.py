"""Predicts from one bfloat16 pass what float16 does to a backward, and measures it in float16.

bfloat16 autocast builds the same graph as float16 autocast, with the range of float32. A loss scale
of 2^k moves every exponent by exactly k. So one backward tells, for every k, which values overflow
and which are flushed to 0. `observe` measures the same in float16, one scale at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from determined_amp.amp.errors import UserError, one_line
from determined_amp.experiment.errors import fault_in_16_bits
from determined_amp.finder.frozen import FrozenBatch, LossScaleError
from determined_amp.finder.histogram import OVERFLOW_LOG2, Histogram
from determined_amp.finder.recorder import BackwardRecorder, Source

# float16 rounds this magnitude and larger ones to infinity.
_FIRST_INFINITE = 65520.0

# Scales for a recording in float16: PyTorch's default, then smaller ones, then larger ones.
_TRIED_LOG2 = (16, 8, 0, -8, -16, 32, 48, 64, 80)


class Place(Protocol):
    """The models and processes of a pass: a `PyTorchTrialContext`, or an object like it."""

    @property
    def models(self) -> Sequence[nn.Module]: ...

    @property
    def distributed(self) -> Any: ...


@dataclass(frozen=True)
class Prediction:
    """The 16-bit values of a few backwards without a loss scale."""

    tensors: dict[Source, Histogram]  # histograms by source, in the order of the backward
    largest: float  # the largest magnitude of all
    # None if recorded in bfloat16. If recorded in float16, log2 of the loss scale; the values that
    # were flushed at that scale are missing.
    recorded_log2: int | None = None
    reason: str = ""  # why it was not recorded in bfloat16

    @cached_property
    def modules(self) -> dict[str, Histogram]:
        """Histograms by module, in the order of the backward."""
        modules: dict[str, Histogram] = {}
        for source, histogram in self.tensors.items():
            modules[source.module] = modules.get(source.module, Histogram.empty()) + histogram
        return modules

    @cached_property
    def total(self) -> Histogram:
        return sum(self.tensors.values(), Histogram.empty())

    def of(self, includes: Callable[[str], bool]) -> Prediction:
        """The prediction for the modules whose name `includes` accepts; `largest` is unchanged."""
        tensors = {s: histogram for s, histogram in self.tensors.items() if includes(s.module)}
        return Prediction(tensors, self.largest)

    def require_gradients(self) -> None:
        """Raise `LossScaleError` if all values are 0, or one is not finite."""
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
        """log2 of the smallest power of two at which a value becomes infinite.

        Raises:
            LossScaleError: if all values are 0, or one is not finite.
        """
        self.require_gradients()
        largest = self.total.largest_log2
        assert largest is not None
        return OVERFLOW_LOG2 - largest

    @property
    def headroom_log2(self) -> float:
        """log2 of the largest scale, not rounded to a power of two, at which nothing overflows."""
        return _headroom(self.largest)

    def flushed_share(self, scale_log2: int) -> float:
        """The largest share of any tensor that float16 flushes to 0 at a loss scale.

        A tensor's share is the norm of its flushed values divided by the norm of all its values. So
        near-zero values beside large ones hardly count. A tensor that is flushed completely has a
        share of 1, however small it is: the parameters behind it stop training.
        """
        return max((h.flushed_share(scale_log2) for h in self.tensors.values()), default=0.0)

    def smallest_scale_log2(self, flushed: float) -> int:
        """log2 of the smallest power of two at which no tensor has a larger flushed share.

        Raises:
            LossScaleError: if all values are 0, or one is not finite.
        """
        self.require_gradients()
        return max(h.smallest_scale_log2(flushed) for h in self.tensors.values() if h.nonzero)


@dataclass(frozen=True)
class Observation:
    """What float16 did to the backwards of a few batches at one loss scale."""

    scale_log2: float
    loss_is_finite: bool  # whether all losses were finite
    # Whether any parameter's gradient was not finite: `GradScaler` skips such a step.
    overflow: bool
    # `Prediction.flushed_share`, measured. If n more values of a tensor are 0 in float16 than in
    # the prediction, its n smallest predicted values count as flushed.
    flushed_share: float
    # log2(65520 / largest 16-bit value of the backward); -inf if a parameter's gradient is not
    # finite, or all are 0. (The metric `headroom_bits` is about parameters' gradients.)
    backward_headroom_bits: float
    # Share, by count, of the nonzero predicted values that are nonzero in float16.
    values_left: float = 1.0


@dataclass(frozen=True)
class _Passes:
    """The result of one backward per batch, on one slot or over all slots."""

    loss_is_finite: bool
    gradients_are_finite: bool
    tensors: dict[Source, Histogram]
    largest: float
    dtypes: frozenset[torch.dtype]

    def __add__(self, other: _Passes) -> _Passes:
        tensors = dict(self.tensors)
        for source, histogram in other.tensors.items():
            tensors[source] = tensors.get(source, Histogram.empty()) + histogram
        return _Passes(
            self.loss_is_finite and other.loss_is_finite,
            self.gradients_are_finite and other.gradients_are_finite,
            tensors,
            max(self.largest, other.largest),
            self.dtypes | other.dtypes,
        )


def predict(context: Place, batches: Sequence[FrozenBatch]) -> Prediction:
    """Run each batch forward and backward once in bfloat16; the result covers all slots.

    If the trial cannot run in bfloat16, it runs in float16 at a scale without overflow.

    Raises:
        LossScaleError: if a loss is not finite, or no backward makes a 16-bit tensor.
    """
    _require_float32_parameters(context)
    passes, reason = _in_bfloat16(context, batches)
    if passes is None:
        return _predict_from_float16(context, batches, reason)
    if not passes.loss_is_finite:
        raise LossScaleError(
            "the loss is not finite, although bfloat16 has the range of float32: look at the "
            "data and the parameters, not at the loss scale"
        )
    if not passes.tensors:
        raise LossScaleError(
            "no backward makes a 16-bit gradient: nothing here runs under float16 autocast. "
            "`python -m determined_amp audit CONFIG` shows what is computed in what"
        )
    tensors = passes.tensors
    if passes.gradients_are_finite:  # what is not finite was masked on the way, as by a ReLU
        tensors = {source: histogram.finite() for source, histogram in tensors.items()}
    return Prediction(tensors, passes.largest)


def observe(
    context: Place, batches: Sequence[FrozenBatch], scale_log2: float, prediction: Prediction
) -> Observation:
    """Run each batch forward and backward once in float16; the result covers all slots.

    The prediction tells which values are 0 without a flush.

    Raises:
        LossScaleError: if the backward made no float16 tensor.
    """
    passes = _in_float16(context, batches, scale_log2, known=not prediction.reason)
    lost = {
        source: max(0, histogram.zeros - prediction.tensors[source].zeros)
        for source, histogram in passes.tensors.items()
        if source in prediction.tensors
    }
    shares = (
        _flushed(prediction.tensors[source], passes.tensors[source], count, scale_log2)
        for source, count in lost.items()
    )
    there = prediction.total.nonzero
    return Observation(
        scale_log2=scale_log2,
        loss_is_finite=passes.loss_is_finite,
        overflow=not passes.gradients_are_finite,
        flushed_share=max(shares, default=0.0),
        backward_headroom_bits=(
            _headroom(passes.largest) if passes.gradients_are_finite else -math.inf
        ),
        values_left=1.0 - sum(lost.values()) / there if there else 1.0,
    )


def _flushed(exact: Histogram, seen: Histogram, lost: int, scale_log2: float) -> float:
    """The share of a tensor's norm that float16 flushed to 0, if `lost` more of its values are 0.

    0 for a tensor of rounding noise, such as the gradient of a bias before a BatchNorm: finer
    rounding makes it much smaller without any part being lost.
    """
    share = exact.faintest_share(lost, scale_log2)
    left = seen.norm / 2.0**scale_log2
    is_noise = left < exact.norm * math.sqrt(1.0 - share**2) / 2
    return 0.0 if is_noise and seen.nonzero else share


def cause_of(context: Place, batches: Sequence[FrozenBatch]) -> str:
    """`FrozenBatch.cause` of the first batch that has one; the same on every rank."""
    for batch in batches:
        try:
            here = batch.cause(context.distributed)
        except Exception as error:  # other ranks wait for this one
            here = f"not found: training the batch again raised {one_line(error)}"
        everywhere = context.distributed.allgather(here)
        if cause := next(filter(None, everywhere), None):
            return str(cause)
    return "its source was not found"


def _require_float32_parameters(context: Place) -> None:
    parameters = (p for model in context.models for p in model.parameters() if p.requires_grad)
    dtype = next((p.dtype for p in parameters if p.dtype in (torch.float16, torch.bfloat16)), None)
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        raise LossScaleError(
            f"the model's parameters are {name}, as after .half() or .bfloat16(); a loss scale is "
            "for float32 parameters under autocast: leave that call out, and write "
            "torch.autocast(device, dtype=torch.float16) around forward and loss"
        )


def _in_bfloat16(context: Place, batches: Sequence[FrozenBatch]) -> tuple[_Passes | None, str]:
    """The passes of all slots, or None and the reason why the trial cannot run in bfloat16."""
    here, reason = None, ""
    try:
        here = _here(context, batches, torch.bfloat16, 0)
    except UserError:
        raise
    # An operation without bfloat16 support can raise anything. If bfloat16 is not the cause, the
    # float16 pass raises the same error again.
    except Exception as error:
        message = (str(error).strip() or "no message").splitlines()[0]
        reason = f"{type(error).__name__}: {message}"
    if here is not None and torch.float16 in here.dtypes:
        reason = "it makes float16 tensors outside autocast, too"
    slots = context.distributed.allgather((here, reason))
    reason = next((reason for _, reason in slots if reason), "")
    return (None, reason) if reason else (_sum([passes for passes, _ in slots]), "")


def _predict_from_float16(
    context: Place, batches: Sequence[FrozenBatch], reason: str
) -> Prediction:
    for scale in _TRIED_LOG2:
        passes = _in_float16(context, batches, scale)
        if _is_finite(passes) and passes.largest > 0:
            break
    else:
        raise LossScaleError(
            f"this trial cannot run in bfloat16: {reason}; and in float16 at no loss scale from "
            f"2^{min(_TRIED_LOG2)} to 2^{max(_TRIED_LOG2)} are its gradients finite and not 0. "
            "Write .float() before what needs float16, as in logits.float().cpu().numpy(), and run "
            "this again"
        )
    # Record again near the top, where the fewest values are flushed.
    higher = scale + math.floor(_headroom(passes.largest)) - 1
    if higher > scale and _is_finite(again := _in_float16(context, batches, higher)):
        scale, passes = higher, again
    tensors = {source: h.unscaled(scale) for source, h in passes.tensors.items()}
    return Prediction(tensors, passes.largest / 2.0**scale, scale, reason)


def _is_finite(passes: _Passes) -> bool:
    return passes.loss_is_finite and passes.gradients_are_finite


def _in_float16(
    context: Place, batches: Sequence[FrozenBatch], scale_log2: float, *, known: bool = False
) -> _Passes:
    """The passes of all slots; `known` is whether the trial is known to run in bfloat16."""
    try:
        here = _here(context, batches, torch.float16, scale_log2)
    except (RuntimeError, TypeError, ValueError) as error:
        fault = fault_in_16_bits(error)
        if isinstance(error, torch.cuda.OutOfMemoryError) or not (fault or known):
            raise
        only = "this trial runs in bfloat16, which needs no loss scale, but not in float16: "
        raise LossScaleError(f"{only if known else ''}{fault or one_line(error)}") from error
    passes = _sum(context.distributed.allgather(here))
    if torch.float16 not in passes.dtypes:
        seen = "bfloat16" if passes.dtypes else "no 16-bit"
        raise LossScaleError(
            f"the backward makes {seen} tensors, none in float16: torch.autocast(device) without a "
            "dtype is bfloat16 on a CPU. For float16, write torch.autocast(device, "
            "dtype=torch.float16); bfloat16 needs no loss scale and no GradScaler"
        )
    return passes


def _here(
    context: Place, batches: Sequence[FrozenBatch], dtype: torch.dtype, scale_log2: float
) -> _Passes:
    recorder = BackwardRecorder(context.models, getattr(context, "optimizers", ()))
    loss_is_finite, gradients_are_finite = True, True
    for batch in batches:
        with recorder.recording():
            gradients = batch.backward(dtype, scale_log2)
        loss_is_finite &= gradients.loss_is_finite
        gradients_are_finite &= gradients.are_finite
    return _Passes(
        loss_is_finite,
        gradients_are_finite,
        recorder.histograms,
        max((h.largest for h in recorder.histograms.values()), default=0.0),
        frozenset(recorder.dtypes),
    )


def _sum(slots: Sequence[_Passes | None]) -> _Passes:
    first, *others = (passes for passes in slots if passes is not None)
    return sum(others, first)


def _headroom(largest: float) -> float:
    return math.log2(_FIRST_INFINITE / largest) if largest else -math.inf
