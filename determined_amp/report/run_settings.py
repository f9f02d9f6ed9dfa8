"""The whole configuration of a run, defaults included, by dotted name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined_amp.experiment.amp_settings import Precision
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import Experiment, Platform
from determined_amp.experiment.plan import read_plan
from determined_amp.experiment.settings import ConfigError, plain, read

AMP = "hyperparameters.amp"
PRECISION = f"{AMP}.precision"
BATCH_SIZE = "hyperparameters.global_batch_size"
LENGTH = "hyperparameters.training.max_length"

SEED = "reproducibility.experiment_seed"
METRIC, SMALLER_IS_BETTER = "searcher.metric", "searcher.smaller_is_better"
TRIAL = "hyperparameters.trial"
ACCURACY = "validation_accuracy"


def by_name(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a `resolved.yaml` of either form, converted to our form.

    Raises:
        LookupError, TypeError, AttributeError, ValueError: if it is not such a configuration.
    """
    problems: list[str] = []
    given = resolved["hyperparameters"]
    plan = read_plan(resolved, given, problems)
    platform = read(Platform, resolved, "", problems, strict=False)
    if plan is None or platform is None or plan.training.max_length is None:
        raise ConfigError("resolved.yaml", problems or [f"{LENGTH}: missing"])
    hyperparameters = {
        "trial": resolved.get("entrypoint"),
        "global_batch_size": None,
        **given,
        "aggregation_frequency": plan.aggregation_frequency,
        "training": plain(plan.training),
    }
    sections = {"data": resolved["data"], "hyperparameters": hyperparameters}
    settings = flat({**plain(platform), **sections})
    if PRECISION not in settings:
        allowed = "a trial with hyperparameters.amp, which names its precision"
        raise ConfigError("resolved.yaml", [f"{PRECISION}: missing; allowed: {allowed}"])
    Precision(settings[PRECISION])
    return settings


def of_experiment(experiment: Experiment[Any]) -> dict[str, Any]:
    """`by_name` of an experiment."""
    return by_name(experiment.resolved())
