"""Changes to a configuration by the options `--config` and `--precision`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.experiment.training import UNITS
from determined_amp.experiment.yaml_text import load_yaml


def with_overrides(
    config: Mapping[str, Any], overrides: Sequence[str], option: str = "--config"
) -> dict[str, Any]:
    """`config` with overrides of the form `a.b=value` applied; values are read as YAML.

    A length has one unit, so `searcher.max_length.batches=40` takes the place of another unit.

    Raises:
        ConfigError: if an override is not of that form; it names the option.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    for override in overrides:
        key, equals, value = override.partition("=")
        *parents, last = key.split(".")
        if not equals or "" in (*parents, last):
            raise ConfigError(option, [f"got {override!r}; allowed: KEY=VALUE"])
        section, parent = changed, ""
        for parent in parents:
            section[parent] = {} if section.get(parent) is None else section[parent]
            section = section[parent]
            if not isinstance(section, dict):
                raise ConfigError(option, [Problem(key, f"{parent} is a value, not a section")])
        if last in UNITS and parent.endswith(("_length", "_period")):
            section.clear()
        section[last] = load_yaml(value, f"{option}: {key}")
    return changed


def in_precision(config: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    """A configuration with the value of a `Precision`; None changes nothing.

    Raises:
        ConfigError: if `hyperparameters.amp` is something else than a section.
    """
    changes = [f"hyperparameters.amp.precision={precision}"] if precision is not None else []
    return with_overrides(config, changes, "--precision")
