"""Whether the loss scale of an experiment can be scored; read without torch."""

from __future__ import annotations

from dataclasses import fields

from determined_amp.amp.errors import Problem, Problems
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment
from determined_amp.finder.scale_score import Score

# Of these metrics less is better.
_COSTS = ("loss_scale_score", "steps_lost", "flushed_share", "overflow")


def check_score(experiment: Experiment) -> None:
    """Check that the loss scale of an experiment can be scored.

    Raises:
        ConfigError: naming every reason why it cannot.
    """
    problems = Problems()
    metrics = [field.name for field in fields(Score)]
    amp, searcher = experiment.amp, experiment.platform.searcher
    slots = experiment.platform.resources.slots_per_trial
    if amp is not None and amp.precision is not Precision.AMP_FP16:
        precision = amp.precision.value
        text = (
            f"got {precision}, which does not scale the loss; allowed for a score:"
            " amp_fp16"
        )
        problems.append(Problem("hyperparameters.amp.precision", text))
    if amp is not None and amp.finds_scale:
        text = "got find; allowed for a score: a number"
        problems.append(Problem("hyperparameters.amp.init_scale", text))
    if searcher.name != "single" and searcher.metric not in (None, *metrics):
        text = (
            f"got {searcher.metric}, which no score has; allowed: {', '.join(metrics)}"
        )
        problems.append(Problem("searcher.metric", text))
    if searcher.metric in _COSTS and not searcher.smaller_is_better:
        text = f"got false; allowed with {searcher.metric}: true"
        problems.append(Problem("searcher.smaller_is_better", text))
    if slots > 1:
        text = (
            f"got {slots}; allowed for a score: 1 (set "
            "hyperparameters.global_batch_size to what one slot trains)"
        )
        problems.append(Problem("resources.slots_per_trial", text))
    problems.raise_from(experiment.name)
