"""Copies an experiment YAML with changes to its `amp` section, and keeps its comments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from determined_amp.experiment.settings import ConfigError


def write_copy(source: Path, target: Path, changes: Mapping[str, Any]) -> None:
    """Write `source` to `target` with `changes` applied to `hyperparameters.amp`.

    Args:
        source: An experiment YAML.
        target: The new file; it must not exist.
        changes: New values by key; None removes the key.

    Raises:
        ConfigError: if `source` has no such section, or `target` exists.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096  # wrap no lines
    yaml.indent(mapping=2, sequence=4, offset=2)
    config = yaml.load(source)
    try:
        section = config["hyperparameters"]["amp"]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            str(source), ["has no section hyperparameters.amp to write the loss scale into"]
        ) from error
    for key, value in changes.items():
        if value is None:
            section.pop(key, None)
        else:
            section[key] = value
    try:
        with target.open("x", encoding="utf-8") as file:
            yaml.dump(config, file)
    except FileExistsError as error:
        raise ConfigError("--write", [f"{target} exists; allowed: a new file"]) from error
