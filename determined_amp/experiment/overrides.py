"""Changes a configuration by the options `--config`, `--trial` and `--precision`."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Sequence

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.dotted import put
from determined_amp.experiment.entrypoint import Task, is_class
from determined_amp.experiment.training import UNITS
from determined_amp.experiment.yaml_text import load_yaml

# YAML reads a colon without a space after it as part of the key.
_STUCK = re.compile(r"\w:\S")


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
        if isinstance(value, dict) and _STUCK.search(text) and None in value.values():
            spaced = text.replace(":", ": ")
            problem = Problem(key, f"got {text}; allowed: '{spaced}', with a space")
            raise ConfigError(option, [problem])
        section, _, last = key.rpartition(".")
        if last in UNITS and section.endswith(("_length", "_period")):
            key, value = section, {last: value}
        try:
            put(changed, key.split("."), value)
        except TypeError as error:
            raise ConfigError(option, [Problem(key, str(error))]) from error
    return changed


def with_trial(config: Config, trial: str | None) -> Config:
    """A configuration whose entrypoint runs another trial; None changes nothing.

    A command of this library stays; any other entrypoint becomes `train`.
    """
    if trial is None:
        return config
    entrypoint = config.get("entrypoint")
    stays = Task.of(entrypoint, []).verb and not is_class(entrypoint)
    start = entrypoint if stays else "python3 -m determined_amp train"
    words = shlex.join(start) if isinstance(start, list) else start
    return {**config, "entrypoint": f"{words} --trial {shlex.quote(trial)}"}


def in_precision(config: Config, precision: str | None) -> Config:
    """A configuration with the value of a `Precision`; None changes nothing.

    Raises:
        ConfigError: if `hyperparameters.amp` is not a section.
    """
    if precision is None:
        return config
    change = f"hyperparameters.amp.precision={precision}"
    return with_overrides(config, [change], "--precision")
