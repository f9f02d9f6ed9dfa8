"""The metrics of a score, and whether an experiment can be scored; read without torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment

# Of these metrics less is better.
_COSTS = ("loss_scale_score", "steps_lost", "flushed_share", "gradient_error", "overflow")


@dataclass(frozen=True)
class Score:
    """The metrics of one loss scale; every value is finite."""

    init_scale_log2: float
    loss_scale_score: float  # log2(1 + `steps_lost`); smaller is better, and 0 is best
    # Steps skipped until nothing overflows, plus `flushed_share` times the scaler's
    # `growth_interval` if that share is above `FLUSHED_LIMIT`.
    steps_lost: float
    # Mean over parameter tensors and batches of min(1, relative 2-norm of the difference from the
    # float32 gradient); 1 if something overflows.
    gradient_error: float
    # log2(65520 / largest 16-bit gradient). If a gradient overflows, that of the scale after the
    # skipped steps, less the bits between the two. If all gradients are flushed to 0, the value
    # that bfloat16 predicts.
    backward_headroom_bits: float
    # 2-norm of the 16-bit gradients that float16 flushed to 0, divided by the 2-norm of all, in the
    # tensor that loses most, at the scale after the skipped steps.
    flushed_share: float
    overflow: float  # 1 if a step with this scale is skipped, otherwise 0


def check_score(experiment: Experiment) -> None:
    """Check that the loss scale of an experiment can be scored.

    Raises:
        ConfigError: naming every reason why it cannot.
    """
    metrics = [field.name for field in fields(Score)]
    slots = experiment.platform.resources.slots_per_trial
    searcher = experiment.platform.searcher
    problems = []
    if experiment.amp is not None and experiment.amp.precision is not Precision.AMP_FP16:
        precision = experiment.amp.precision.value
        text = f"got {precision}, which does not scale the loss; allowed for a score: amp_fp16"
        problems.append(Problem("hyperparameters.amp.precision", text))
    if experiment.amp is not None and experiment.amp.finds_scale:
        text = "got find; allowed for a score: a number"
        problems.append(Problem("hyperparameters.amp.init_scale", text))
    if searcher.name != "single" and searcher.metric not in (None, *metrics):
        text = f"got {searcher.metric}, which no score has; allowed: {', '.join(metrics)}"
        problems.append(Problem("searcher.metric", text))
    if searcher.metric in _COSTS and not searcher.smaller_is_better:
        text = f"got false; allowed with {searcher.metric}: true"
        problems.append(Problem("searcher.smaller_is_better", text))
    if slots > 1:
        text = (
            f"got {slots}; allowed for a score: 1 (set hyperparameters.global_batch_size to what "
            "one slot trains)"
        )
        problems.append(Problem("resources.slots_per_trial", text))
    if problems:
        raise ConfigError(experiment.name, problems)
