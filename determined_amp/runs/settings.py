"""The whole configuration of a run, defaults included, by dotted name."""

from __future__ import annotations

from typing import Any

from determined_amp.amp.errors import ConfigError
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import Experiment, Platform
from determined_amp.experiment.fields import plain, read
from determined_amp.experiment.plan import read_plan

AMP = "hyperparameters.amp"
PRECISION = f"{AMP}.precision"
BATCH_SIZE = "hyperparameters.global_batch_size"
TRAINING = "hyperparameters.training"
LENGTH = f"{TRAINING}.max_length"

SEED = "reproducibility.experiment_seed"
METRIC, SMALLER_IS_BETTER = "searcher.metric", "searcher.smaller_is_better"
TRIAL = "hyperparameters.trial"
ACCURACY = "validation_accuracy"


def of_experiment(experiment: Experiment[Any]) -> dict[str, Any]:
    """The settings of an experiment, in our form if its YAML is in Determined's.

    Raises:
        ConfigError: if the experiment has a mistake.
    """
    resolved = experiment.resolved()
    problems: list[str] = []
    own = resolved["hyperparameters"]
    plan = read_plan(resolved, own, problems)
    platform = read(Platform, resolved, "", problems, strict=False)
    if plan is None or platform is None:
        raise ConfigError(experiment.name, problems)
    hyperparameters = {
        "trial": resolved.get("entrypoint"),
        "global_batch_size": None,
        **own,
        "aggregation_frequency": plan.aggregation_frequency,
        "training": plain(plan.training),
    }
    return flat({**plain(platform), "data": resolved["data"], "hyperparameters": hyperparameters})
