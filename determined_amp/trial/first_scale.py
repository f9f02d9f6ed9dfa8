"""Finds the loss scale that a training starts with, on batches of its own."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

from determined import pytorch

from determined_amp.amp.core import AmpCore
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import AmpSettings, OnOverflow
from determined_amp.experiment.dotted import value_at
from determined_amp.finder.found_scale import FoundScale, run_now, scale_sentences
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_finding import find_range
from determined_amp.trial.determined_private import (
    aggregation_frequency,
    hyperparameters,
    scaler_of,
)
from determined_amp.trial.notes import note_on_master

logger = logging.getLogger(__name__)

# How the sentences of a finding begin that are of no use in the log of a training.
_NEEDLESS = ("starting at", "verdict:")


def settings_with_found_scale(
    amp: AmpCore,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    rehearsal: Rehearsal,
) -> AmpSettings:
    """Find the loss scale of a training, and give it to its scaler.

    A rehearsal restores models and random state. What the trial itself keeps, such as a
    counter, a queue or a generator of its own, sees every rehearsal.

    Args:
        amp: The trial's mixed precision.
        trial: The trial.
        context: Its context.
        rehearsal: That of the first batch.

    Returns:
        The settings with the scale that was found, or torch's default if there is none.

    Raises:
        ConfigError: if no scale helps, unless `on_overflow` is `warn`, or `min_scale`
            overflows.
    """
    begun = time.perf_counter()
    first = max(amp.settings.first_scale, amp.settings.min_scale)
    default = dataclasses.replace(amp.settings, init_scale=first)
    name = type(trial).__name__
    try:
        answer = find_on_batches([rehearsal], name, trial, context, amp)
    except LossScaleError as error:
        logger.warning(
            "init_scale: find found none: %s; starting with %g", error, first
        )
        return default
    scale = _usable_scale(amp.settings, answer)
    if scale is None:
        return default
    amp.scaler.load_state_dict({**amp.scaler.state_dict(), "scale": scale})
    note_on_master(context, init_scale=scale)
    if amp.slots.rank == 0:
        needless = ("starting at",) if answer.finding.answer_log2 is None else _NEEDLESS
        texts = [
            text for text in scale_sentences(answer) if not text.startswith(needless)
        ]
        logger.info(
            "init_scale: find found %s in %.1f s, %d samples forward and backward: %s",
            *(repr(scale), time.perf_counter() - begun, answer.passed_samples),
            "; ".join(texts),
        )
    return dataclasses.replace(default, init_scale=scale)


def _usable_scale(settings: AmpSettings, answer: FoundScale) -> float | None:
    """The scale to start with; None if none helps and the settings only want a
    warning.
    """
    scale = answer.init_scale
    if scale is None:
        *_, verdict = scale_sentences(answer)
        because = verdict.removeprefix("verdict: ")
        problem = f"init_scale: got find, and {because}; allowed: amp_bf16"
        if settings.on_overflow is OnOverflow.ABORT:
            raise ConfigError("the trial", [problem])
        logger.warning("%s", problem)
        return None
    if settings.min_scale > 2.0**answer.finding.top_log2:
        problem = (
            f"init_scale: got find, which found {scale:g}, and gradients overflow at "
            f"min_scale {settings.min_scale:g}; allowed: min_scale: {scale * 2.0**-8:g}"
        )
        raise ConfigError("the trial", [problem])
    return max(scale, settings.min_scale)


def find_on_batches(
    rehearsals: Sequence[Rehearsal],
    name: str,
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    amp: AmpCore | None,
) -> FoundScale:
    """Find the loss scale on some batches of a trial.

    Args:
        rehearsals: Those of the batches, on every rank.
        name: Name of the experiment.
        trial: The trial.
        context: Its context, with an enabled scaler.
        amp: The trial's mixed precision, if it has one.

    Raises:
        LossScaleError: if no scale can be found.
    """
    scaler = scaler_of(context)
    finding = find_range(rehearsals, context.distributed)
    samples = sum(
        int(trial.get_batch_length(rehearsal.batch)) for rehearsal in rehearsals
    )
    samples_of_slots = context.distributed.allgather(samples)
    run = run_now(
        name,
        context.device,
        batches=len(rehearsals),
        samples=sum(samples_of_slots),
        init_scale=float(scaler.get_scale()),
        growth_interval=int(scaler.get_growth_interval()),
        is_ours=amp is not None,
        min_scale=amp.settings.min_scale if amp else 0.0,
        steps=_steps(context),
    )
    return FoundScale(finding, run)


def _steps(context: pytorch.PyTorchTrialContext) -> int | None:
    """The optimizer steps of the whole run; None unless its YAML gives a length in
    batches.
    """
    length = value_at(hyperparameters(context) or {}, "training.max_length")
    batches = length.get("batches") if isinstance(length, Mapping) else None
    return (
        batches // aggregation_frequency(context) if isinstance(batches, int) else None
    )
