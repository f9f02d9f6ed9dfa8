"""Gives a trial's own batches to the finder and the score, without a training.

The trial's `train_batch` runs in Determined's loop, so data, model, loss and
accumulation are the same as in training.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

import determined as det
import torch
from determined import pytorch

from determined_amp.amp.patched import patched
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.restored import without_steps
from determined_amp.amp.tensors import own_copy
from determined_amp.finder.found_scale import FoundScale
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_score import Score
from determined_amp.finder.scoring import NoScaleError, score_batches
from determined_amp.trial.determined_private import (
    BatchCollector,
    controlled_by,
    end_loop,
    scaler_of,
    what_steps,
)
from determined_amp.trial.first_scale import find_on_batches
from determined_amp.trial.mixed_precision import MixedPrecision

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Longer than any training, so that a resumed loop does not end before its first batch.
_NEVER = pytorch.Batch(2**40)


def find_in_trial(
    name: str,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    batches: int,
    *,
    latest_checkpoint: str | None = None,
) -> FoundScale:
    """Find the initial loss scale of a trial; the trial cannot be used afterwards.

    Args:
        name: Name of the experiment.
        trial: The trial.
        context: Its context.
        batches: Number of training batches to use.
        latest_checkpoint: The checkpoint to start from, in the context's checkpoint
            storage.

    Raises:
        LossScaleError: if the trial has no loss scale, or none can be found.
    """
    amp = MixedPrecision.of(context)

    def find(rehearsals: Sequence[Rehearsal]) -> FoundScale:
        return find_on_batches(rehearsals, name, trial, context, amp)

    return in_training(trial, context, batches, find, latest_checkpoint)


def score(
    trial: pytorch.PyTorchTrial, context: pytorch.PyTorchTrialContext, batches: int
) -> dict[str, float]:
    """Score the current scale of the trial's `GradScaler` on its first training
    batches.

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
    scaler, amp = wrapped_scaler(context), MixedPrecision.of(context)
    scale_log2 = math.log2(scaler.get_scale())

    def measure(rehearsals: Sequence[Rehearsal]) -> Score:
        return score_batches(
            rehearsals,
            context.distributed,
            scale_log2,
            growth_interval=int(scaler.get_growth_interval()),
            backoff_factor=float(scaler.get_backoff_factor()),
            min_scale=amp.settings.min_scale if amp else 0.0,
        )

    try:
        return asdict(in_training(trial, context, batches, measure))
    except NoScaleError as error:
        raise det.InvalidHP(str(error)) from error


class PreemptedError(SystemExit):
    """The platform has asked a task to stop before it measured anything."""


def in_training(
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    batches: int,
    work: Callable[[Sequence[Rehearsal]], T],
    latest_checkpoint: str | None = None,
) -> T:
    """Pass the first batches of Determined's loop to `work`, end the loop, and return
    the result.

    Args:
        trial: The trial; it cannot be used afterwards.
        context: Its context.
        batches: Number of batches to collect.
        work: Called once with the rehearsals of all of them, on every rank.
        latest_checkpoint: The checkpoint to start from, in the context's checkpoint
            storage.

    Raises:
        LossScaleError: if the trial has no enabled `GradScaler`, or nothing to train.
    """
    context = _prepared(context)
    answer: Future[T] = Future()

    def finish(rehearsals: Sequence[Rehearsal]) -> None:
        try:
            answer.set_result(work(rehearsals))
        except Exception as error:
            # Determined's loop may save a checkpoint on its way out
            answer.set_exception(error)

    collect = _collector(context, trial.train_batch, batches, finish)
    with patched(trial, "train_batch", collect), controlled_by(BatchCollector):
        pytorch.Trainer(trial, context).fit(
            max_length=_NEVER,
            reporting_period=_NEVER,
            latest_checkpoint=latest_checkpoint,
            checkpoint_policy="none",
        )
    if not answer.done():  # the platform asked to stop before the last batch
        raise PreemptedError(0)
    return answer.result()


def _collector(
    context: pytorch.PyTorchTrialContext,
    train_batch: Callable[..., Any],
    batches: int,
    finish: Callable[[Sequence[Rehearsal]], None],
) -> Callable[..., dict[str, Any]]:
    """A `train_batch` that trains nothing, passes so many batches on, and ends the
    loop.
    """
    rehearsals: list[Rehearsal] = []

    def collect(batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        def train(own: Any) -> object:
            return train_batch(own, epoch_idx, batch_idx)

        rehearsals.append(_rehearsal_of(context, batch, train))
        if len(rehearsals) == batches:
            finish(rehearsals)
            end_loop()
        # With several slots, an empty dict would raise an IndexError on the chief.
        return {"batch_samples": 0.0}

    return collect


def _prepared(context: pytorch.PyTorchTrialContext) -> pytorch.PyTorchTrialContext:
    """The context as the trial sees it, with nothing that would end the loop at an
    overflow.
    """
    wrapped_scaler(context)
    if not any(p.requires_grad for model in context.models for p in model.parameters()):
        raise LossScaleError(
            "no parameter of this trial requires a gradient: there is nothing to "
            "train, or to scale; leave out requires_grad_(False) for what is to be "
            "trained"
        )
    amp = MixedPrecision.of(context)
    if amp is None:
        return context
    amp.guard.enabled = False
    return amp.context


def _rehearsal_of(
    context: pytorch.PyTorchTrialContext, batch: Any, train: Callable[[Any], object]
) -> Rehearsal:
    amp = MixedPrecision.of(context)
    if amp is not None:  # which also counts steps and moves the learning rate
        return amp.rehearsal_by(lambda: train(own_copy(batch)), batch)

    def train_again(scale: float | None) -> None:
        scaler, others = wrapped_scaler(context), what_steps(context)
        with without_steps(scaler, context.optimizers, others, scale=scale):
            train(own_copy(batch))

    return Rehearsal(train_again, context.models, context.optimizers, batch)


def wrapped_scaler(context: pytorch.PyTorchTrialContext) -> torch.amp.GradScaler:
    """The enabled scaler that the trial passed to `wrap_scaler` or got from `use_amp`.

    Raises:
        LossScaleError: if there is none.
    """
    scaler = scaler_of(context)
    if scaler is None or not scaler.is_enabled():
        remedy = (
            "it has no enabled GradScaler that context.wrap_scaler knows; with "
            "hyperparameters.amp.precision: amp_fp16, or --precision amp_fp16, it "
            "trains in float16 as it is"
            if MixedPrecision.of(context) is None
            else "for float16, set hyperparameters.amp.precision to amp_fp16, or add "
            "--precision amp_fp16"
        )
        raise LossScaleError(
            "this trial scales no loss: float32 and bfloat16 need no loss scale; "
            f"{remedy}"
        )
    enabled: torch.amp.GradScaler = scaler
    return enabled
