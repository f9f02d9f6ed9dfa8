"""Options that several commands share, including `--config` as in `det experiment create`.

This module imports little: `search` needs it before it imports torch.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from determined_amp.experiment.settings import ConfigError
from determined_amp.experiment.yaml_text import load_yaml

# Of a length or a period, which has one of them.
UNITS = ("batches", "records", "epochs")


def add_override_option(parser: argparse.ArgumentParser) -> None:
    """Add the repeatable option `--config KEY=VALUE`, stored as `overrides`."""
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


def add_batches_option(parser: argparse.ArgumentParser) -> None:
    """Add `--batches`, the number of batches to measure on."""
    parser.add_argument(
        "--batches",
        type=at_least(1, 1000),
        default=4,
        metavar="N",
        help="training batches to measure on (4)",
    )


def at_least(least: int, most: int = 10**9) -> Callable[[str], int]:
    """The `type` of an option that takes an integer from `least` to `most`."""

    def number(text: str) -> int:
        if not (text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
            limit = f" and <= {most}" if most < 10**9 else ""
            raise argparse.ArgumentTypeError(f"got {text}; allowed: an integer >= {least}{limit}")
        return int(text)

    return number


def with_overrides(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`config` with overrides of the form `a.b=value` applied; values are read as YAML.

    A length has one unit, so `searcher.max_length.batches=40` takes the place of another unit.

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
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                raise ConfigError("--config", [f"{key}: {parent} is a value, not a section"])
        if last in UNITS and parents and parents[-1].endswith(("_length", "_period")):
            section.clear()
        section[last] = load_yaml(value, f"--config: {key}")
    return changed
