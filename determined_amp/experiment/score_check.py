"""Checks without torch whether the loss scale of an experiment can be scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from determined_amp.amp.errors import Problem, Problems
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment
from determined_amp.finder.scale_score import Score

# For these metrics, less is better.
_COSTS = ("loss_scale_score", "steps_lost", "flushed_share", "overflow")


def check_score(experiment: Experiment) -> None:
    """Check that the loss scale of an experiment can be scored.

    Raises:
        ConfigError: naming every reason why it cannot.
    """
    Problems(_reasons(experiment)).raise_from(experiment.name)


def _reasons(experiment: Experiment) -> Iterator[Problem]:
    metrics = [field.name for field in fields(Score)]
    amp, searcher = experiment.amp, experiment.platform.searcher
    slots = experiment.platform.resources.slots_per_trial
    if amp is not None and amp.precision is not Precision.AMP_FP16:
        yield Problem(
            "hyperparameters.amp.precision",
            f"got {amp.precision.value}, which does not scale the loss; allowed for a "
            "score: amp_fp16",
        )
    if amp is not None and amp.finds_scale:
        yield Problem(
            "hyperparameters.amp.init_scale",
            "got find; allowed for a score: a number",
        )
    if searcher.name != "single" and searcher.metric not in (None, *metrics):
        yield Problem(
            "searcher.metric",
            f"got {searcher.metric}, which no score has; allowed: {', '.join(metrics)}",
        )
    if searcher.metric in _COSTS and not searcher.smaller_is_better:
        yield Problem(
            "searcher.smaller_is_better",
            f"got false; allowed with {searcher.metric}: true",
        )
    if slots > 1:
        yield Problem(
            "resources.slots_per_trial",
            f"got {slots}; allowed for a score: 1 (set "
            "hyperparameters.global_batch_size to what one slot trains)",
        )
