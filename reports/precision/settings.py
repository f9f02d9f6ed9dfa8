"""A run's whole configuration, defaults included, by the dotted names of its YAML."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from reports.sources import flat
from trials.experiment import Experiment

AMP = "hyperparameters.amp"
PRECISION = f"{AMP}.precision"
BATCH_SIZE = "hyperparameters.global_batch_size"
LENGTH = "hyperparameters.training.max_length"
SEED = "reproducibility.experiment_seed"

# What a resolved configuration calls otherwise, beside the sections of the platform.
_SECTIONS = {"data": "data", "hparams": "hyperparameters"}


def by_name(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a `resolved.yaml`."""
    sections = {name: resolved[section] for section, name in _SECTIONS.items()}
    return flat({**resolved["platform"], **sections})


def of_experiment(experiment: Experiment[Any]) -> dict[str, Any]:
    """The same of a configuration that was parsed."""
    return by_name(_plain(dataclasses.asdict(experiment)))


def _plain(value: Any) -> Any:
    """Settings as the types YAML has."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    return list(value) if isinstance(value, tuple) else value
