"""Changes to a configuration by the options `--config` and `--precision`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.experiment.training import UNITS
from determined_amp.experiment.yaml_text import load_yaml


def with_overrides(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`config` with overrides of the form `a.b=value` applied; values are read as YAML.

    A length has one unit, so `searcher.max_length.batches=40` takes the place of another unit.

    Raises:
        ConfigError: if an override is not of that form.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    for override in overrides:
        key, equals, value = override.partition("=")
        *parents, last = path = key.split(".")
        if not equals or "" in path:
            raise ConfigError("--config", [f"got {override!r}; allowed: KEY=VALUE"])
        section: dict[str, Any] = changed
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            if not isinstance(section[parent], dict):
                problem = Problem(key, f"{parent} is a value, not a section")
                raise ConfigError("--config", [problem])
            section = section[parent]
        if last in UNITS and parents and parents[-1].endswith(("_length", "_period")):
            section.clear()
        section[last] = load_yaml(value, f"--config: {key}")
    return changed


def in_precision(config: Mapping[str, Any], precision: str | None) -> dict[str, Any]:
    """A configuration with the value of a `Precision`; None changes nothing.

    Raises:
        ConfigError: if `hyperparameters.amp` is something else than a section.
    """
    hyperparameters = config.get("hyperparameters") or {}
    if precision is None or not isinstance(hyperparameters, Mapping):
        return dict(config)
    section = hyperparameters.get("amp")
    if section is not None and not isinstance(section, Mapping):
        text = (
            f"got {section!r}, which is the trial's own; allowed: a section amp: "
            "{precision: ...}, or no key of that name"
        )
        raise ConfigError("--precision", [Problem("hyperparameters.amp", text)])
    amp = {**(section or {}), "precision": precision}
    return {**config, "hyperparameters": {**hyperparameters, "amp": amp}}
