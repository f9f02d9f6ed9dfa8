"""A run's whole configuration, defaults included, by the dotted names of its YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from determined_amp.config.amp import Precision
from determined_amp.config.experiment import Experiment, Platform
from determined_amp.config.plan import read_plan
from determined_amp.config.settings import ConfigError, plain, read

AMP = "hyperparameters.amp"
PRECISION = f"{AMP}.precision"
BATCH_SIZE = "hyperparameters.global_batch_size"
LENGTH = "hyperparameters.training.max_length"
LENGTH_UNITS = ("batches", "epochs")
SEED = "reproducibility.experiment_seed"
METRIC, SMALLER_IS_BETTER = "searcher.metric", "searcher.smaller_is_better"
TRIAL = "hyperparameters.trial"
ACCURACY = "validation_accuracy"


def by_name(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a `resolved.yaml`, in our form whichever it has.

    Raises:
        LookupError, TypeError, AttributeError, ValueError: if it is something else.
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
    """The same of a configuration that was parsed."""
    return by_name(experiment.resolved())


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters by dotted name; a search space is one value."""
    return dict(_leaves(values, prefix))


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and "type" not in value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, Mapping) and value["type"] == "const":
            yield f"{prefix}{key}", value.get("val")
        else:
            yield f"{prefix}{key}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of `flat`."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        section = made
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return made
