"""Runs training batches through a trial repeatedly while its parameters stay the same.

The trial's own `train_batch` runs in Determined's own loop, so data, model, loss and accumulation
are the same as in training. Only the optimizer step is left out. Float16 autocast regions can run
in another dtype instead: bfloat16 builds the same graph with the range of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import determined as det
import torch
from determined import pytorch
from torch import nn

from determined_amp.amp.diagnosis import find_cause
from determined_amp.amp.patched import patched
from determined_amp.amp.replay import (
    float16_as,
    own_copy,
    parameters_in,
    undisturbed,
    without_steps,
)
from determined_amp.amp.slots import Slots
from determined_amp.experiment.errors import UserError
from determined_amp.trial.determined_0_38 import (
    SafeController,
    controlled_by,
    end_loop,
    scaler_of,
    what_steps,
)
from determined_amp.trial.mixed_precision import MixedPrecision

T = TypeVar("T")

# Longer than any training, so a resumed loop does not end before the first batch.
_NEVER = pytorch.Batch(2**40)


# All batches are in memory at once, so their number is limited; a few are enough.
MOST_BATCHES = 1000


class LossScaleError(UserError):
    """No loss scale can be found. The message says why, and what to do."""


@dataclass(frozen=True)
class Gradients:
    """The result of one backward.

    Args:
        loss_is_finite: Whether the scaled loss, the argument of `context.backward`, was finite.
        parameters: The gradients of all parameters that got one, still scaled.
    """

    loss_is_finite: bool
    parameters: tuple[torch.Tensor, ...]

    @property
    def are_finite(self) -> bool:
        """Whether `GradScaler` would step; synchronises.

        Raises:
            LossScaleError: if no parameter got a gradient.
        """
        if not self.parameters:
            raise LossScaleError("no parameter gets a gradient: there is nothing to scale")
        norms = torch._foreach_norm(list(self.parameters), float("inf"))
        return bool(torch.isfinite(torch.stack([norm.float() for norm in norms])).all())


class FrozenBatch(ABC):
    """A batch whose forward, loss and backward can run any number of times.

    Args:
        models: The models whose parameters get the gradients.
        batch: The batch.
        optimizers: Those of the trial; they may hold parameters that are in no model.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        batch: Any,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self.batch = batch

    @property
    @abstractmethod
    def samples(self) -> int:
        """Number of samples of this batch, on this slot."""

    @abstractmethod
    def _pass(self, scale: float, after_backward: Callable[[torch.Tensor], None]) -> None:
        """Run forward, scaled loss and backward, then pass the scaled loss to `after_backward`."""

    def backward(self, dtype: torch.dtype | None, scale_log2: float = 0) -> Gradients:
        """Run forward, loss and backward, without a step.

        Parameters, gradients, buffers, scaler and random state are restored.

        Args:
            dtype: The dtype to use in float16 autocast regions; None for float32.
            scale_log2: log2 of the loss scale.

        Raises:
            LossScaleError: if a trial does not call `context.backward`.
        """
        losses: list[torch.Tensor] = []
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        parameters = parameters_in(self._models, self._optimizers)

        def keep(loss: torch.Tensor) -> None:
            losses.append(loss.detach())
            # Copied before the trial clips them or sets them to 0.
            gradients.update({p: p.grad.clone() for p in parameters if p.grad is not None})

        with undisturbed(*self._models, optimizers=self._optimizers), float16_as(dtype):
            self._pass(2.0**scale_log2, keep)
        finite = all(bool(torch.isfinite(loss).all()) for loss in losses)
        return Gradients(finite, tuple(gradients.values()))

    def cause(self, slots: Slots) -> str | None:
        """A sentence on what overflows in float16 without a loss scale, see `find_cause`."""

        def train(scale: float) -> None:
            self._pass(scale, lambda loss: None)

        return find_cause(self._models, self.batch, train, optimizers=self._optimizers, slots=slots)


class TrialBatch(FrozenBatch):
    """One batch of a trial.

    Args:
        trial: The trial.
        context: Its context, with an enabled `GradScaler`.
        batch: The argument of `train_batch` from Determined's loop.
        train: Calls the trial's `train_batch`; gets a copy of the batch in each pass.
    """

    def __init__(
        self,
        trial: pytorch.PyTorchTrial,
        context: pytorch.PyTorchTrialContext,
        batch: Any,
        train: Callable[[Any], object],
    ) -> None:
        super().__init__(context.models, batch, context.optimizers)
        self._trial = trial
        self._context = context
        self._train = train

    @property
    def samples(self) -> int:
        return int(self._trial.get_batch_length(self.batch))

    def _pass(self, scale: float, after_backward: Callable[[torch.Tensor], None]) -> None:
        backward, backwards = self._context.backward, 0

        def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            nonlocal backwards
            backwards += 1
            backward(loss, *args, **kwargs)
            after_backward(loss)

        with self._without_step(scale), patched(self._context, "backward", watched):
            self._train(own_copy(self.batch))
        if not backwards:
            raise LossScaleError(
                "train_batch of this trial does not call context.backward, which Determined needs "
                "to average gradients; write self.context.backward(self.scaler.scale(loss)) "
                "instead of scaler.scale(loss).backward()"
            )

    @contextmanager
    def _without_step(self, scale: float) -> Iterator[None]:
        context, scaler = self._context, wrapped_scaler(self._context)
        amp = MixedPrecision.of(context)
        before = scaler.state_dict()
        # `MixedPrecision` also counts steps and advances the learning rate with them: stop both.
        still = (
            without_steps(scaler, context.optimizers, what_steps(context))
            if amp is None
            else amp.without_steps()
        )
        with still:
            scaler.load_state_dict({**before, "scale": scale})
            try:
                yield
            finally:
                scaler.load_state_dict(before)


def in_training(
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    batches: int,
    work: Callable[[Sequence[TrialBatch]], T],
    latest_checkpoint: str | None = None,
) -> T:
    """Collect the first batches of Determined's loop, pass them to `work`, and end the loop.

    Args:
        trial: The trial; it cannot be used afterwards.
        context: Its context.
        batches: Number of batches to collect.
        work: Called once with all of them, on every rank.
        latest_checkpoint: The checkpoint to start from, in the context's checkpoint storage.

    Returns:
        The result of `work`.

    Raises:
        LossScaleError: if the trial has no enabled `GradScaler`.
        determined.InvalidHP: if `work` raises it.
    """
    wrapped_scaler(context)
    if not any(p.requires_grad for model in context.models for p in model.parameters()):
        raise LossScaleError(
            "no parameter of this trial requires a gradient: there is nothing to train, or to "
            "scale; leave out requires_grad_(False) for what is to be trained"
        )
    amp = MixedPrecision.of(context)
    if amp is not None:
        amp.watched = False  # audit and guard would end the loop: here overflows are expected
        context = amp.context
    train_batch = trial.train_batch
    frozen: list[TrialBatch] = []
    results: list[T] = []
    invalid: list[det.InvalidHP] = []

    def collect(batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        def train(own: Any) -> object:
            return train_batch(own, epoch_idx, batch_idx)

        frozen.append(TrialBatch(trial, context, batch, train))
        if len(frozen) == batches:
            try:
                results.append(work(frozen))
            except det.InvalidHP as error:  # Determined's loop would save a checkpoint first
                invalid.append(error)
            end_loop()
        # With several slots, an empty dict would raise an IndexError on the chief.
        return {"batch_samples": 0.0}

    with patched(trial, "train_batch", collect), controlled_by(SafeController):
        pytorch.Trainer(trial, context).fit(
            max_length=_NEVER,
            reporting_period=_NEVER,
            latest_checkpoint=latest_checkpoint,
            checkpoint_policy="none",
        )
    if invalid:
        raise invalid[0]
    if not results:  # the platform asked to stop before the last batch
        raise SystemExit(0)
    return results[0]


def wrapped_scaler(context: pytorch.PyTorchTrialContext) -> torch.amp.GradScaler:
    """The enabled scaler that the trial passed to `wrap_scaler` or got from `use_amp`.

    Raises:
        LossScaleError: if there is none.
    """
    scaler = scaler_of(context)
    if scaler is None or not scaler.is_enabled():
        remedy = (
            "it has no enabled GradScaler that context.wrap_scaler knows; --precision amp_fp16 "
            "trains it in float16 as it is"
            if MixedPrecision.of(context) is None
            else "for float16, set hyperparameters.amp.precision to amp_fp16"
        )
        raise LossScaleError(
            f"this trial scales no loss: float32 and bfloat16 need no loss scale; {remedy}"
        )
    found: torch.amp.GradScaler = scaler
    return found
