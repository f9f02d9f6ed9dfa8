"""A run's whole configuration, defaults included, by the dotted names of its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined_amp.config.amp import Precision
from determined_amp.config.experiment import Experiment
from determined_amp.local.folder import resolved
from determined_amp.reports.sources import flat

AMP = "hyperparameters.amp"
PRECISION = f"{AMP}.precision"
BATCH_SIZE = "hyperparameters.global_batch_size"
LENGTH = "hyperparameters.training.max_length"
LENGTH_UNITS = ("batches", "epochs")
SEED = "reproducibility.experiment_seed"
METRIC, SMALLER_IS_BETTER = "searcher.metric", "searcher.smaller_is_better"
TRIAL = "hyperparameters.trial"
ACCURACY = "validation_accuracy"
GUARD = tuple(f"{AMP}.{key}" for key in ("min_scale", "max_consecutive_skips", "max_skip_ratio"))

# Of what comes from a file: the rest is only compared.
_NEEDED = (BATCH_SIZE, SEED, METRIC, SMALLER_IS_BETTER, TRIAL, *GUARD)

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
