"""Training batches that are passed through a trial again and again while nothing moves.

The trial's own `train_batch` runs, in Determined's own loop, so that data, model, loss and
accumulation are those of the training. Only the step is left out, and the float16 of its autocast
regions can be made another dtype: bfloat16 makes the same graph with the range of float32.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import determined as det
import numpy as np
import torch
from determined import pytorch
from torch import nn

from determined_amp.amp.checkpoint import SafeController, controlled_by, patched
from determined_amp.amp.diagnosis import find_cause, undisturbed
from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.config.errors import UserError

T = TypeVar("T")

# Longer than any training that a checkpoint may come from.
_NEVER = pytorch.Batch(2**40)


class LossScaleError(UserError):
    """There is no loss scale to look for: what was found instead, and what to do."""


@dataclass(frozen=True)
class Gradients:
    """What one backward left behind.

    Args:
        loss_is_finite: Whether the loss was, as `context.backward` got it: scaled.
        parameters: The gradients of all parameters that got one, still scaled.
    """

    loss_is_finite: bool
    parameters: tuple[torch.Tensor, ...]

    @property
    def are_finite(self) -> bool:
        """What `GradScaler` would find; synchronises.

        Raises:
            LossScaleError: if no parameter got a gradient.
        """
        if not self.parameters:
            raise LossScaleError("no parameter gets a gradient: there is nothing to scale")
        norms = torch._foreach_norm(list(self.parameters), float("inf"))
        return bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())


class FrozenBatch:
    """One batch of a trial.

    Args:
        trial: The trial.
        context: Its context, with an enabled `GradScaler`.
        batch: What Determined's loop gave to `train_batch`.
        train: The trial's `train_batch`, on this batch.
    """

    def __init__(
        self,
        trial: pytorch.PyTorchTrial,
        context: pytorch.PyTorchTrialContext,
        batch: Any,
        train: Callable[[], object],
    ) -> None:
        self._trial = trial
        self._context = context
        self.batch = batch
        self._train = train

    @property
    def samples(self) -> int:
        """Of this batch, on this slot."""
        return int(self._trial.get_batch_length(self.batch))

    def backward(self, dtype: torch.dtype | None, scale_log2: float = 0) -> Gradients:
        """Forward, loss and backward, without a step.

        Parameters, gradients, buffers, scaler and random state are afterwards as before.

        Args:
            dtype: What float16 autocast regions compute in; None for float32.
            scale_log2: The loss scale is 2 to that power.

        Raises:
            LossScaleError: if the trial does not call `context.backward`.
        """
        losses: list[torch.Tensor] = []
        gradients: dict[nn.Parameter, torch.Tensor] = {}
        parameters = [p for model in self._context.models for p in model.parameters()]
        backward = self._context.backward

        def keep_loss(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            losses.append(loss.detach())
            backward(loss, *args, **kwargs)
            # Here, before the trial clips them or sets them to 0.
            gradients.update({p: p.grad.clone() for p in parameters if p.grad is not None})

        watched = patched(self._context, "backward", keep_loss)
        with self._frozen(2.0**scale_log2), float16_as(dtype), watched:
            self._train()
        if not losses:
            raise LossScaleError("train_batch of this trial does not call context.backward")
        finite = all(bool(torch.isfinite(loss).all()) for loss in losses)
        return Gradients(finite, tuple(gradients.values()))

    def cause(self) -> str | None:
        """In which module float16 overflows without any scale, in a sentence; None if it does not.

        If a model is wrapped in DistributedDataParallel, every rank must call this.
        """

        def train() -> None:
            with self._frozen(1.0):
                self._train()

        causes = [find_cause(model, self.batch, train) for model in self._context.models]
        return next((cause for cause in causes if cause), None)

    @contextmanager
    def _frozen(self, scale: float) -> Iterator[None]:
        context, scaler = self._context, wrapped_scaler(self._context)
        amp = getattr(self._trial, "amp", None)
        before = scaler.state_dict()
        with ExitStack() as stack:
            stack.enter_context(_host_random_state())
            for model in context.models:
                stack.enter_context(undisturbed(model))
            for name in ("step", "update", "unscale_"):
                stack.enter_context(patched(scaler, name, _do_nothing))
            stack.enter_context(patched(context, "step_optimizer", _do_nothing))
            # Ours also counts steps and moves the learning rate with them.
            if isinstance(amp, MixedPrecision):
                stack.enter_context(amp.without_steps())
            stack.callback(scaler.load_state_dict, before)
            scaler.load_state_dict({**before, "scale": scale})
            yield


def cause_of(context: pytorch.PyTorchTrialContext, batches: Sequence[FrozenBatch]) -> str:
    """The first cause that any batch of any rank knows; the same on every rank."""
    here = next((cause for cause in [batch.cause() for batch in batches] if cause), None)
    everywhere = context.distributed.allgather(here)
    return next((cause for cause in everywhere if cause), "its source was not found")


def in_training(
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    batches: int,
    work: Callable[[Sequence[FrozenBatch]], T],
    latest_checkpoint: str | None = None,
) -> T:
    """Start Determined's loop, take its first training batches instead of training them, and end.

    Args:
        trial: The trial; with this it has been used up.
        context: Its context.
        batches: Batches to take.
        work: Is called once with all of them, on every rank.
        latest_checkpoint: Where to start from, in the context's checkpoint storage.

    Returns:
        What `work` returned.

    Raises:
        LossScaleError: if the trial has no enabled `GradScaler`.
        determined.InvalidHP: if `work` does.
    """
    wrapped_scaler(context)
    train_batch = trial.train_batch
    frozen: list[FrozenBatch] = []
    results: list[T] = []
    invalid: list[det.InvalidHP] = []

    def take(batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        train = partial(train_batch, batch, epoch_idx, batch_idx)
        frozen.append(FrozenBatch(trial, context, batch, train))
        if len(frozen) == batches:
            try:
                results.append(work(frozen))
            except det.InvalidHP as error:  # in the loop, Determined would save a checkpoint first
                invalid.append(error)
            raise pytorch._ShouldExit(skip_exit_checkpoint=True)
        # With several slots, an empty dict is an IndexError on the chief.
        return {"batch_samples": 0.0}

    with patched(trial, "train_batch", take), controlled_by(SafeController):
        pytorch.Trainer(trial, context).fit(
            max_length=_NEVER,
            reporting_period=_NEVER,
            latest_checkpoint=latest_checkpoint,
            checkpoint_policy="none",
        )
    if invalid:
        raise invalid[0]
    if not results:  # the platform asked to stop before the last of the batches
        raise SystemExit(0)
    return results[0]


def wrapped_scaler(context: pytorch.PyTorchTrialContext) -> torch.amp.GradScaler:
    """The enabled scaler that the trial gave to `wrap_scaler` or got from `use_amp`.

    Raises:
        LossScaleError: if there is none.
    """
    scaler: Any = context._scaler
    if scaler is None or not scaler.is_enabled():
        raise LossScaleError(
            "this trial scales no loss: it has no enabled GradScaler that context.wrap_scaler "
            "knows. float32 and bfloat16 need no loss scale; for float16, set "
            "hyperparameters.amp.precision to amp_fp16"
        )
    found: torch.amp.GradScaler = scaler
    return found


@contextmanager
def float16_as(dtype: torch.dtype | None) -> Iterator[None]:
    """Let every autocast region for float16 compute in another dtype, or not autocast at all."""
    enter = torch.autocast.__enter__

    def enter_as(region: torch.autocast) -> Any:
        given = region.fast_dtype, region._enabled
        if given == (torch.float16, True):
            region.fast_dtype, region._enabled = dtype or torch.float16, dtype is not None
        try:
            return enter(region)  # type: ignore[no-untyped-call]  # torch has no types here
        finally:
            region.fast_dtype, region._enabled = given

    with patched(torch.autocast, "__enter__", enter_as):
        yield


@contextmanager
def _host_random_state() -> Iterator[None]:
    ours, numpys = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(numpys)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None
