"""`--config KEY=VALUE`: changes of a YAML from the command line, as `det experiment create` makes.

Imports little, for programs that first of all start a process.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from determined_amp.config.settings import ConfigError

# What PyYAML raises on bytes, nesting, dates and the like that it cannot construct.
NOT_YAML = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


def add_override_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config KEY=VALUE`, any number of times, as `overrides`."""
    parser.add_argument(
        "--config",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change one value of the YAML, as `det experiment create --config` does",
    )


def add_trial_option(parser: argparse.ArgumentParser) -> None:
    """Add `--trial module:Class`."""
    parser.add_argument(
        "--trial",
        metavar="MODULE:CLASS",
        help="the trial, or a function that makes it, if the YAML does not name it",
    )


def with_overrides(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`config` with `a.b=value` applied; values are read as YAML.

    Raises:
        ConfigError: if an override is not of that form.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not (key and equals):
            raise ConfigError("--config", [f"got {override!r}; allowed: KEY=VALUE"])
        section: dict[str, Any] = changed
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError("--config", [f"{key}: {parent} is a value, not a section"])
        try:
            section[last] = yaml.safe_load(value)
        except NOT_YAML as error:
            raise ConfigError("--config", [f"{key}: {value!r} is not YAML"]) from error
    return changed
