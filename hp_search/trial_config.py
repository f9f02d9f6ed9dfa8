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
    changes = dict(sampled)
    base = _read_experiment(changes.pop("experiment", None), context)
    hyperparameters = _laid_over(base["hyperparameters"], changes)
    _round_init_scale(hyperparameters, search)
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
        sections = isinstance(below, Mapping) and isinstance(value, Mapping)
        if sections and not _LENGTH_UNITS.issuperset(value):
            merged[key] = _laid_over(below, value)
        else:
            merged[key] = value
    return merged


def _round_init_scale(hyperparameters: dict[str, Any], search: Mapping[str, Any]) -> None:
    """Make a sampled scale a power of two: multiplying by one is exact, and so is its inverse."""
    space: Any = search.get("hyperparameters")
    for key in ("amp", "init_scale"):
        space = space.get(key) if isinstance(space, Mapping) else None
    if not isinstance(space, Mapping) or space.get("type") in ("categorical", "const"):
        return
    sampled = hyperparameters["amp"]["init_scale"]
    if isinstance(sampled, (int, float)) and sampled > 0:
        hyperparameters["amp"]["init_scale"] = 2.0 ** round(math.log2(sampled))
