"""Composes the experiment of one trial from the YAML of its search and the sampled values.

The key `hyperparameters.experiment` of a search names an experiment YAML. The `hyperparameters` and
`data` of the search replace those of the experiment; everything else (searcher, name, seed,
resources) comes from the search. The key `hyperparameters.seed` sets the seeds of the trials.
Trials with the same seed differ only in their other hyperparameters.

An experiment in Determined's own form has its trial in the entrypoint, and its lengths outside the
hyperparameters. Both are kept. If the search has lengths, which are always in
`hyperparameters.training`, they replace the lengths of the experiment.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined_amp.amp.fields import ConfigError
from determined_amp.experiment.dotted import put, value_at
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.plan import WITHOUT_EFFECT, has_our_form
from determined_amp.experiment.training import LENGTH_UNITS
from determined_amp.search.trial_kind import TrialKind

EXAMPLE = "experiment_configs/mlp/amp.yaml"
# The lengths of `hyperparameters.training`, and their names in Determined's own form.
_DETERMINEDS_LENGTHS = {
    "max_length": "searcher.max_length",
    "validation_period": "min_validation_period",
    "checkpoint_period": "min_checkpoint_period",
}


def compose(search: Mapping[str, Any], sampled: Mapping[str, Any], context: Path) -> dict[str, Any]:
    """A complete experiment configuration for `config.experiment.parse`.

    Args:
        search: The configuration of the search, with its search spaces.
        sampled: A value for every hyperparameter of the search, nested as in the YAML.
        context: The context directory; `hyperparameters.experiment` is a path inside it.

    Raises:
        ConfigError: if the experiment is missing, outside the context, or itself a search, or if
            the seed is invalid.
    """
    changes = _round_init_scale(sampled, search)
    base = _read_experiment(changes.pop("experiment", None), context)
    if TrialKind.of(search) is TrialKind.COMPARE:
        _check_metric(search, base)
    seed = _chosen_seed(sampled)
    changes.pop("seed", None)
    composed = {**search}
    if not has_our_form(base["hyperparameters"]):
        composed = _with_determineds_keys(search, base, changes.pop("training", None))
    composed["hyperparameters"] = _merged(base["hyperparameters"], changes)
    composed["data"] = _merged(base.get("data") or {}, search.get("data") or {})
    if "trial" not in composed["hyperparameters"]:
        composed["entrypoint"] = base.get("entrypoint")
    if seed is not None:
        reproducibility = {**(search.get("reproducibility") or {}), "experiment_seed": seed}
        composed["reproducibility"] = reproducibility
    return composed


def _with_determineds_keys(
    search: Mapping[str, Any], base: Mapping[str, Any], training: object
) -> dict[str, Any]:
    """`search` with the experiment's keys of Determined's form.

    Args:
        search: The search; its own keys of that form are kept.
        base: The experiment.
        training: Lengths of the search in our form; they replace those of the experiment.

    Raises:
        ConfigError: if Determined's form has no key for something in `training`.
    """
    composed: dict[str, Any] = copy.deepcopy(dict(search))
    keys: list[tuple[str, object]] = [(name, default) for name, default, _ in WITHOUT_EFFECT]
    keys += [
        ("perform_initial_validation", False),
        ("optimizations.average_aggregated_gradients", True),
    ]
    for name, default in keys:
        value = value_at(base, name)
        if value is not None and value_at(search, name) in (None, default):
            put(composed, name.split("."), value)
    given = training if isinstance(training, Mapping) else {}
    problems = []
    for key, length in given.items():
        batches = length.get("batches") if isinstance(length, Mapping) else None
        if key in _DETERMINEDS_LENGTHS:
            put(composed, _DETERMINEDS_LENGTHS[key].split("."), length)
        elif key == "reporting_period" and batches is not None:
            composed["scheduling_unit"] = batches
        else:
            problems.append(
                f"hyperparameters.training.{key}: got {length!r}, and the experiment has no "
                "section hyperparameters.training; allowed: max_length, validation_period, "
                "checkpoint_period, and reporting_period in batches"
            )
    if problems:
        raise ConfigError("search", problems)
    return composed


def _check_metric(search: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise if a comparison ranks by a different metric than the one its experiment reports."""
    ours, theirs = (section.get("searcher") or {} for section in (search, base))
    problems = [
        f"searcher.{key}: got {ours.get(key)!r}, but the experiment has {theirs[key]!r}; allowed: "
        f"the same, by --config searcher.{key}={json.dumps(theirs[key])}"
        for key in ("metric", "smaller_is_better")
        if key in theirs and ours.get(key) != theirs[key]
    ]
    if problems:
        raise ConfigError("search", problems)


def _chosen_seed(sampled: Mapping[str, Any]) -> int | None:
    """The seed that a search sets for a trial; None if it sets none.

    Raises:
        ConfigError: if it is not a 32-bit integer, which Determined and NumPy require.
    """
    seed = sampled.get("seed")
    is_seed = isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32
    if seed is not None and not is_seed:
        raise ConfigError(
            "search",
            [f"hyperparameters.seed: got {seed!r}; allowed: an integer >= 0 and below 2^32"],
        )
    return seed


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


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section; a length is replaced, as it has only one unit."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        is_length = both and value and {*LENGTH_UNITS}.issuperset(value)
        merged[key] = _merged(below or {}, value) if both and not is_length else value
    return merged


def _round_init_scale(
    hyperparameters: Mapping[str, Any], search: Mapping[str, Any]
) -> dict[str, Any]:
    """`hyperparameters` with the initial scale rounded to a power of two if it is from a range.

    Scaling by a power of two is exact. A scale that the search lists or fixes is not rounded.
    """
    space = value_at(search, "hyperparameters.amp.init_scale")
    is_range = isinstance(space, Mapping) and space.get("type") not in ("categorical", "const")
    scale = value_at(hyperparameters, "amp.init_scale")
    if not is_range or not isinstance(scale, (int, float)) or scale <= 0:
        return dict(hyperparameters)
    amp = {**hyperparameters["amp"], "init_scale": 2.0 ** round(math.log2(scale))}
    return {**hyperparameters, "amp": amp}
