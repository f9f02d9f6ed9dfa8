"""Measures the effect of the loss scale on the gradients of a trial, on a few frozen batches."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import determined as det
import numpy as np
import torch
from determined import core, pytorch

from determined_amp.amp.fields import ConfigError
from determined_amp.amp.patched import patched
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment
from determined_amp.finder.frozen import MOST_BATCHES, LossScaleError
from determined_amp.finder.score import Score, score
from determined_amp.local.context import make_context
from determined_amp.trial.unmodified import trial_of

logger = logging.getLogger(__name__)

# The metrics of `scored`.
_SCORED = ("init_scale_log2", *(field.name for field in dataclasses.fields(Score)))

# Number of batches used to measure a trial before it trains.
MEASURED_BATCHES = 2


def batches_to_score(experiment: Experiment[Any]) -> int:
    """The number of frozen batches to score a trial on: its `max_length`.

    Raises:
        ConfigError: if the experiment cannot be scored.
    """
    slots = experiment.platform.resources.slots_per_trial
    batches = experiment.max_length.batches
    problems = []
    if experiment.amp is None:
        problems.append(
            "hyperparameters.amp: missing; a search for the loss scale needs a trial that reads it"
        )
    elif experiment.amp.precision is not Precision.AMP_FP16:
        problems.append(
            f"hyperparameters.amp.precision: got {experiment.amp.precision.value}, which does not "
            "scale the loss; allowed in a search for the loss scale: amp_fp16"
        )
    if batches is None:
        problems.append(
            "hyperparameters.training.max_length: got epochs; allowed where trials are scored, "
            "not trained: the number of batches to score, such as {batches: 4}"
        )
    elif batches > MOST_BATCHES:
        problems.append(_too_many(batches))
    metric = experiment.platform.searcher.metric
    if metric not in (None, *_SCORED):
        problems.append(
            f"searcher.metric: got {metric}, which no score has; allowed: {', '.join(_SCORED)}"
        )
    if slots > 1:
        problems.append(
            f"resources.slots_per_trial: got {slots}; allowed where trials are scored: 1 (set "
            "hyperparameters.global_batch_size to what one slot trains)"
        )
    if problems or batches is None:
        raise ConfigError(experiment.name, problems)
    return batches


def _too_many(batches: int) -> str:
    return (
        f"hyperparameters.training.max_length.batches: got {batches}; allowed where batches are "
        f"looked at, not trained: 1 to {MOST_BATCHES}, such as 4"
    )


def batches_to_use(experiment: Experiment[Any]) -> int:
    """The number of training batches for the finder: the experiment's `max_length`.

    Raises:
        ConfigError: if that is not a number of batches.
    """
    length = experiment.training.max_length
    batches = None if length is None else length.batches
    if batches is None:
        raise ConfigError(
            "search",
            [
                f"hyperparameters.training.max_length.batches: got {batches!r}; allowed: the "
                "number of training batches to use, such as 4"
            ],
        )
    if batches > MOST_BATCHES:
        raise ConfigError("search", [_too_many(batches)])
    return batches


def scored(
    trial: pytorch.PyTorchTrial,
    context: pytorch.PyTorchTrialContext,
    experiment: Experiment[Any],
    batches: int,
) -> dict[str, float]:
    """The validation metrics of a scored trial: the metrics of `score` and `init_scale_log2`.

    Raises:
        determined.InvalidHP: if no scale can train this experiment.
        LossScaleError: if the trial has no gradient to scale.
    """
    assert experiment.amp is not None  # checked by `batches_to_score`
    scale = experiment.amp.init_scale
    return {"init_scale_log2": math.log2(scale), **score(trial, context, batches)}


def report_flushed_share(context: pytorch.PyTorchTrialContext, experiment: Experiment[Any]) -> None:
    """Make every validation report the initial scale, and the `flushed_share` of its `Score`.

    A second trial with the same seed measures the share and is then dropped, so the training itself
    does not change. Every rank measures by itself and gets the same result.

    Args:
        context: The context of the trial. The trial is not made yet.
        experiment: Its experiment.

    Raises:
        determined.InvalidHP: if no scale can train this experiment.
    """
    if experiment.amp is None or experiment.amp.precision is not Precision.AMP_FP16:
        return
    # Hide the cluster information, so that `Trainer` does not resume the twin from a checkpoint.
    with _random_state_kept(context.device), patched(det, "get_cluster_info", lambda: None):
        twin = _twin(context, experiment)
        trial = trial_of(experiment, twin)
        try:
            measured = scored(trial, twin, experiment, MEASURED_BATCHES)
        except LossScaleError as error:
            logger.warning("flushed_share is not reported: %s", error)
            return
    _Constant(context, {name: measured[name] for name in ("init_scale_log2", "flushed_share")})


class _Constant(pytorch.MetricReducer):
    """Reports the same numbers in every validation."""

    def __init__(self, context: pytorch.PyTorchTrialContext, metrics: dict[str, float]) -> None:
        self._metrics = metrics
        context.wrap_reducer(self, for_training=False)

    def reset(self) -> None:
        """Called by Determined before every validation."""

    def per_slot_reduce(self) -> dict[str, float]:
        return self._metrics

    def cross_slot_reduce(self, per_slot_metrics: list[dict[str, float]]) -> dict[str, float]:
        return per_slot_metrics[0]


def _twin(
    context: pytorch.PyTorchTrialContext, experiment: Experiment[Any]
) -> pytorch.PyTorchTrialContext:
    """A single-process context with the seed, device and batch of one slot of `context`."""
    alone = core.DummyDistributedContext()
    twin = make_context(
        core.Context(context._core.checkpoint, distributed=alone),
        experiment,
        exp_conf=copy.deepcopy(dict(context.get_experiment_config())),
        trial_seed=context.get_trial_seed(),
        slots_per_trial=context.distributed.size,
        num_gpus=int(context.device.type == "cuda"),
        enable_tensorboard_logging=False,
    )
    twin.device = context.device  # a single-process context takes the first GPU
    return twin


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    python: Any = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    random.setstate(python)
    np.random.set_state(numpy)
