"""Changes a configuration by the options `--config`, `--precision` and `--test`."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.dotted import put
from determined_amp.experiment.training import (
    LENGTH_UNITS,
    WITHOUT_EFFECT,
    has_our_form,
)
from determined_amp.experiment.yaml_text import load_yaml

# The lengths of a run that `det experiment create --test` makes, in our form.
_OF_A_TEST = (
    "{max_length: 1 batches, validation_period: 1 batches, reporting_period: 1 batches}"
)


def with_overrides(
    config: Config, overrides: Sequence[str], option: str = "--config"
) -> Values:
    """Apply overrides of the form `a.b=value` to a copy of `config`. Values are YAML.

    A length has one unit, so `searcher.max_length.batches=40` replaces another unit.

    Raises:
        ConfigError: if an override cannot be applied. The message names the option.
    """
    changed: Values = copy.deepcopy(dict(config))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or "" in key.split("."):
            raise ConfigError(option, [f"got {override!r}; allowed: KEY=VALUE"])
        value = load_yaml(text, f"{option}: {key}")
        section, _, last = key.rpartition(".")
        if last in LENGTH_UNITS and section.endswith(("_length", "_period")):
            key, value = section, {last: value}
        try:
            put(changed, key.split("."), value)
        except TypeError as error:
            raise ConfigError(option, [Problem(key, str(error))]) from error
    return changed


def in_precision(config: Config, precision: str | None) -> Config:
    """A configuration with the value of a `Precision`; None changes nothing.

    Raises:
        ConfigError: if `hyperparameters.amp` is not a section.
    """
    if precision is None:
        return config
    change = f"hyperparameters.amp.precision={precision}"
    return with_overrides(config, [change], "--precision")


def for_test(config: Config) -> Config:
    """A configuration of one batch, if `det experiment create --test` made it.

    `det` writes the lengths of a short test in Determined's form only.
    """
    is_test = str(config.get("description")).startswith("[test-mode] ")
    if not (is_test and has_our_form(config)):
        return config
    lengths = f"hyperparameters.training={_OF_A_TEST}"
    unread = [f"{name}=null" for name, _, _ in WITHOUT_EFFECT]
    # A variant of a test may have other lengths.
    return with_overrides(config, ["description=null", lengths, *unread])
