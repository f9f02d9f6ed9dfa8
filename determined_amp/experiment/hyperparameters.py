"""What a search makes of the hyperparameters of a YAML: ranges, constants, samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from determined_amp.amp.plain_data import Config
from determined_amp.experiment.dotted import flat, value_at

# This hyperparameter sets the seed of a trial. Without it, the platform draws a seed.
TRIAL_SEED = "trial_seed"

_NUMBERS = ("int", "double", "log")
_RANGES = (*_NUMBERS, "categorical")


def constants(hyperparameters: Config) -> Config:
    """Hyperparameters as a trial on a cluster gets them: `{type: const, val: x}`
    becomes x.
    """
    made = dict(hyperparameters)
    for key, value in made.items():
        if isinstance(value, Mapping):
            is_const = value.get("type") == "const"
            made[key] = value.get("val") if is_const else constants(value)
    return made


def ranges(values: Config) -> Iterator[str]:
    """The dotted names of the hyperparameters that are search ranges."""
    for name, value in flat(values).items():
        if isinstance(value, Mapping) and value.get("type") in _RANGES:
            yield name


def with_power_of_two(values: Config, search: Config) -> Config:
    """The hyperparameters with `amp.init_scale` rounded, if `search` has a range for
    it.
    """
    space = value_at(search, "hyperparameters.amp.init_scale")
    scale = value_at(values, "amp.init_scale")
    is_range = isinstance(space, Mapping) and space.get("type") in _NUMBERS
    if not is_range or not isinstance(scale, (int, float)) or scale <= 0:
        return values
    return {
        **values,
        "amp": {**values["amp"], "init_scale": 2.0 ** round(math.log2(scale))},
    }
