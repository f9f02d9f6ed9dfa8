"""The experiment that one trial of a search trains, from the search's YAML and what was sampled.

A search names the experiment it searches over in one key, `hyperparameters.experiment`, and beside
it holds only what it samples or changes. Its `hyperparameters` and `data` are laid over those of
the experiment; everything else (searcher, name, seed, resources) is the search's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trials.experiment import read_yaml
from trials.settings import ConfigError

EXAMPLE = "experiment_configs/mlp/amp.yaml"
_LENGTH_UNITS = frozenset({"batches", "epochs"})


def compose(search: Mapping[str, Any], sampled: Mapping[str, Any], context: Path) -> dict[str, Any]:
    """One complete experiment configuration, to be given to `trials.experiment.parse`.

    Args:
        search: The configuration of the search, with its search spaces.
        sampled: A value for every hyperparameter of the search, nested as there, as a cluster hands
            it over.
        context: The context directory; `hyperparameters.experiment` is a path inside it.

    Raises:
        ConfigError: if the experiment is missing, outside the context, or itself a search.
    """
    changes = round_init_scale(sampled, search)
    base = _read_experiment(changes.pop("experiment", None), context)
    hyperparameters = _laid_over(base["hyperparameters"], changes)
    data = _laid_over(base.get("data") or {}, search.get("data") or {})
    return {**search, "data": data, "hyperparameters": hyperparameters}


def _read_experiment(name: object, context: Path) -> Mapping[str, Any]:
    allowed = f"allowed: the path of an experiment YAML in the context directory, such as {EXAMPLE}"

    def wrong(what: str) -> ConfigError:
        return ConfigError("search", [f"hyperparameters.experiment: {what}; {allowed}"])

    if not isinstance(name, str):
        raise wrong("missing" if name is None else f"got {name!r}")
    root = context.resolve()
    path = (root / name).resolve()
    if Path(name).is_absolute() or not path.is_relative_to(root):
        raise wrong(f"{name} is not a path inside {context}, and nothing else reaches a cluster")
    if not path.is_file():
        raise wrong(f"{name} is not a file in {root}")
    experiment = read_yaml(str(path))
    if not isinstance(experiment.get("hyperparameters"), Mapping):
        raise wrong(f"{name} has no hyperparameters")
    if "experiment" in experiment["hyperparameters"]:
        raise wrong(f"{name} is itself a search")
    return experiment


def _laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section; a length, one number in a unit, is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        is_length = both and value and _LENGTH_UNITS.issuperset(value)
        merged[key] = _laid_over(below or {}, value) if both and not is_length else value
    return merged


def round_init_scale(
    hyperparameters: Mapping[str, Any], search: Mapping[str, Any]
) -> dict[str, Any]:
    """`hyperparameters` with a sampled scale made a power of two.

    Multiplying by one is exact, and so is its inverse. A scale that the search lists or fixes is
    used as it is.
    """
    space = _init_scale(search.get("hyperparameters"))
    is_range = isinstance(space, Mapping) and space.get("type") not in ("categorical", "const")
    scale = _init_scale(hyperparameters)
    if not is_range or not isinstance(scale, (int, float)) or scale <= 0:
        return dict(hyperparameters)
    amp = {**hyperparameters["amp"], "init_scale": 2.0 ** round(math.log2(scale))}
    return {**hyperparameters, "amp": amp}


def _init_scale(hyperparameters: Any) -> Any:
    for key in ("amp", "init_scale"):
        is_section = isinstance(hyperparameters, Mapping)
        hyperparameters = hyperparameters.get(key) if is_section else None
    return hyperparameters
