"""Finds and scores a loss scale on a trial's own batches.

The trial's `train_batch` runs in Determined's loop, so data, model, loss and
accumulation are the same as in training. A command trains nothing. A training with
`init_scale: find` goes on with the scale found on its first batch.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import determined as det
import torch
from determined import pytorch

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.patched import patched
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.restored import without_steps
from determined_amp.amp.settings import AmpSettings, OnOverflow, scale_text
from determined_amp.amp.tensors import own_copy, parameters_in
from determined_amp.finder.found_scale import FoundScale, run_now, scale_sentences
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_finding import find_range
from determined_amp.finder.scale_score import Score
from determined_amp.finder.scoring import NoScaleError, score_batches
from determined_amp.trial.controller import BatchCollector
from determined_amp.trial.determined_private import (
    amp_of,
    controlled_by,
    end_loop,
    scaler_of,
    step_methods,
)
from determined_amp.trial.notes import note_on_master

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Longer than any training, so that a resumed loop reaches at least one batch.
_NEVER = pytorch.Batch(2**40)
_WITHOUT_END: Any = {
    "max_length": _NEVER,
    "reporting_period": _NEVER,
    "checkpoint_policy": "none",
}


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
    wrapped_scaler(context)
    find = partial(_find, name=name, trial=trial, context=context)
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
        determined.InvalidHP: if every loss scale that the settings allow overflows.
        LossScaleError: if the trial scales no loss, or has no gradient to scale.
    """
    scaler, amp = wrapped_scaler(context), amp_of(context)
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
        return dataclasses.asdict(in_training(trial, context, batches, measure))
    except NoScaleError as error:
        raise det.InvalidHP(str(error)) from error


def in_training(
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    batches: int,
    work: Callable[[Sequence[Rehearsal]], T],
    latest_checkpoint: str | None = None,
) -> T:
    """Pass the first batches of a training to `work`, and return its result.

    Args:
        trial: The trial; it cannot be used afterwards.
        context: Its context.
        batches: Number of batches to collect.
        work: Called once on every rank, with the rehearsals of these batches.
        latest_checkpoint: The checkpoint to start from, in the context's checkpoint
            storage.

    Raises:
        Exception: the error that `work` raises.
    """
    amp = amp_of(context)
    if amp is not None:  # an enabled guard would audit, and end the run at an overflow
        amp.guard.enabled = False
    answer: Future[T] = Future()

    def finish(rehearsals: Sequence[Rehearsal]) -> None:
        try:
            answer.set_result(work(rehearsals))
        except Exception as error:
            # Raised later: Determined's loop might save a checkpoint on its way out.
            answer.set_exception(error)

    collect = _collector(context, trial.train_batch, batches, finish)
    with patched(trial, "train_batch", collect), controlled_by(BatchCollector):
        trainer = pytorch.Trainer(trial, context)
        trainer.fit(latest_checkpoint=latest_checkpoint, **_WITHOUT_END)
    if not answer.done():  # the platform asked to stop before the last batch
        raise SystemExit(0)
    return answer.result()


def _collector(
    context: pytorch.PyTorchTrialContext,
    train_batch: Callable[..., Any],
    batches: int,
    finish: Callable[[Sequence[Rehearsal]], None],
) -> Callable[..., dict[str, Any]]:
    """A `train_batch` that collects batches, calls `finish`, and ends the loop."""
    rehearsals: list[Rehearsal] = []

    def collect(batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        train = partial(train_batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        rehearsals.append(_rehearsal_of(context, batch, train))
        if len(rehearsals) == batches:
            finish(rehearsals)
            end_loop()
        # With several slots, an empty dict would raise an IndexError on the chief.
        return {"batch_samples": 0.0}

    return collect


def _rehearsal_of(
    context: pytorch.PyTorchTrialContext, batch: Any, train: Callable[[Any], object]
) -> Rehearsal:
    amp = amp_of(context)
    if amp is not None:  # its rehearsal also leaves counts and schedules alone
        return amp.rehearsal_by(lambda: train(own_copy(batch)), batch)

    def train_again(scale: float | None) -> None:
        # a trial that is only audited may have no scaler
        scaler = scaler_of(context) or torch.amp.GradScaler(enabled=False)
        others = step_methods(context)
        with without_steps(scaler, context.optimizers, others, scale=scale):
            train(own_copy(batch))

    return Rehearsal(train_again, context.models, context.optimizers, batch)


def wrapped_scaler(context: pytorch.PyTorchTrialContext) -> torch.amp.GradScaler:
    """The enabled scaler that the trial passed to `wrap_scaler` or got from `use_amp`.

    Raises:
        LossScaleError: if there is no such scaler, or nothing to train.
    """
    scaler = scaler_of(context)
    if scaler is None or not scaler.is_enabled():
        remedy = (
            "it has no enabled GradScaler that context.wrap_scaler knows; with "
            "hyperparameters.amp.precision: amp_fp16, or --precision amp_fp16, it "
            "trains in float16 as it is"
            if amp_of(context) is None
            else "for float16, set hyperparameters.amp.precision to amp_fp16, or add "
            "--precision amp_fp16"
        )
        raise LossScaleError(
            "this trial scales no loss: float32 and bfloat16 need no loss scale; "
            f"{remedy}"
        )
    if not any(p.requires_grad for p in parameters_in(context.models)):
        raise LossScaleError(
            "no parameter of this trial requires a gradient: there is nothing to "
            "train, or to scale; leave out requires_grad_(False) for what is to be "
            "trained"
        )
    enabled: torch.amp.GradScaler = scaler
    return enabled


def settings_with_found_scale(
    amp: AmpCore,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    rehearsal: Rehearsal,
) -> AmpSettings:
    """Find the loss scale of a training, and give it to the scaler.

    Args:
        amp: The trial's mixed precision.
        trial: The trial.
        context: Its context.
        rehearsal: The rehearsal of the first batch.

    Returns:
        The settings with the scale that was found; without one, with `first_scale`.

    Raises:
        ConfigError: if no scale helps, unless `on_overflow` is `warn`.
    """
    begun = time.perf_counter()
    scale = amp.settings.first_scale
    try:
        answer = _find([rehearsal], type(trial).__name__, trial, context)
        scale = _usable_scale(amp.settings, answer)
    except LossScaleError as error:
        text = "init_scale: find found none: %s; starting with %s"
        logger.warning(text, error, scale_text(scale))
    else:
        amp.scaler.load_state_dict({**amp.scaler.state_dict(), "scale": scale})
        if amp.slots.rank == 0:
            _tell(answer, scale, time.perf_counter() - begun)
    note_on_master(context, init_scale=scale)
    return dataclasses.replace(amp.settings, init_scale=scale)


def _tell(answer: FoundScale, scale: float, seconds: float) -> None:
    """Log what was found, and the scale that the training starts with."""
    assert answer.init_scale is not None
    found, raised = scale_text(answer.init_scale), ""
    if scale > answer.init_scale:
        raised = f", and the training starts with min_scale, {scale_text(scale)}"
    safe, *others = scale_sentences(answer.finding)
    text = "init_scale: find found %s in %.1f s: %s%s"
    if answer.finding.answer_log2 is None:  # say why float16 is not advised
        why = "; ".join([safe, *others])
        logger.warning(text, found, seconds, why, raised)
    else:
        logger.info(text, found, seconds, safe, raised)


def _usable_scale(settings: AmpSettings, answer: FoundScale) -> float:
    """The scale to start with.

    Raises:
        LossScaleError: if no scale helps, and `on_overflow` is `warn`.
        ConfigError: if no scale helps otherwise, or `min_scale` overflows.
    """
    scale = answer.init_scale
    if scale is None:
        because = f"no scale helps: {answer.finding.cause}"
        if settings.on_overflow is OnOverflow.WARN:
            raise LossScaleError(because)
        problem = f"init_scale: got find, and {because}; allowed: amp_bf16"
        raise ConfigError("the trial", [problem])
    if settings.min_scale > 2.0**answer.finding.top_log2:
        problem = (
            f"init_scale: got find, which found {scale_text(scale)}, and gradients "
            f"overflow at min_scale {scale_text(settings.min_scale)}; allowed: "
            f"min_scale: {scale * 2.0**-8:g}"
        )
        raise ConfigError("the trial", [problem])
    return max(scale, settings.min_scale)


def _find(
    rehearsals: Sequence[Rehearsal],
    name: str,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
) -> FoundScale:
    """Find the loss scale on some batches of a trial.

    Args:
        rehearsals: The rehearsals of this rank's batches. Every rank must call this.
        name: Name of the experiment.
        trial: The trial.
        context: Its context, with an enabled scaler.

    Raises:
        LossScaleError: if no scale can be found.
    """
    amp = amp_of(context)
    finding = find_range(rehearsals, context.distributed)
    samples = sum(int(trial.get_batch_length(each.batch)) for each in rehearsals)
    run = run_now(
        name,
        context.device,
        batches=len(rehearsals),
        samples=sum(context.distributed.allgather(samples)),
        init_scale=float(scaler_of(context).get_scale()),
        is_ours=amp is not None,
        min_scale=amp.settings.min_scale if amp else 0.0,
    )
    return FoundScale(finding, run)
