"""A run's whole configuration, defaults included, by the dotted names of its YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from determined_amp.config.amp import Precision
from determined_amp.config.experiment import Experiment
from determined_amp.local.folder import resolved

AMP = "hyperparameters.amp"
PRECISION = f"{AMP}.precision"
BATCH_SIZE = "hyperparameters.global_batch_size"
LENGTH = "hyperparameters.training.max_length"
LENGTH_UNITS = ("batches", "epochs")
SEED = "reproducibility.experiment_seed"
METRIC, SMALLER_IS_BETTER = "searcher.metric", "searcher.smaller_is_better"
TRIAL = "hyperparameters.trial"
ACCURACY = "validation_accuracy"

# Of what comes from a file: the rest is only compared.
_NEEDED = (BATCH_SIZE, SEED, METRIC, SMALLER_IS_BETTER, TRIAL)

# What a resolved configuration calls otherwise, beside the sections of the platform.
_SECTIONS = {"data": "data", "hparams": "hyperparameters"}


def by_name(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a `resolved.yaml`.

    Raises:
        LookupError, TypeError, AttributeError, ValueError: if it is something else.
    """
    sections = {name: resolved[section] for section, name in _SECTIONS.items()}
    settings = flat({**resolved["platform"], **sections})
    Precision(settings[PRECISION])
    missing = [name for name in _NEEDED if name not in settings]
    if missing or all(settings.get(f"{LENGTH}.{unit}") is None for unit in LENGTH_UNITS):
        raise KeyError(*missing or [LENGTH])
    return settings


def of_experiment(experiment: Experiment[Any]) -> dict[str, Any]:
    """The same of a configuration that was parsed."""
    return by_name(resolved(experiment))


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
