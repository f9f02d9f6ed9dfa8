"""Composes the experiment of one trial from the YAML of its search and what was sampled.

A search names the experiment it searches over in one key, `hyperparameters.experiment`, and beside
it holds only what it samples or changes. Its `hyperparameters` and `data` are laid over those of
the experiment; everything else (searcher, name, seed, resources) is the search's own. A second key,
`hyperparameters.seed`, gives its trials seeds of its choice: those that share one differ in nothing
but their other hyperparameters.

An experiment of Determined's own form names its trial in the entrypoint and its lengths outside the
hyperparameters. These come along, and the lengths of a search, which always stand in
`hyperparameters.training`, take their places.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined_amp.config.amp import SCALER_KEYS, Precision
from determined_amp.config.experiment import read_yaml
from determined_amp.config.plan import WITHOUT_EFFECT, has_our_form, value_at
from determined_amp.config.settings import ConfigError
from determined_amp.search.trial_kind import TrialKind

EXAMPLE = "experiment_configs/mlp/amp.yaml"
_LENGTH_UNITS = frozenset({"batches", "epochs"})
# Where Determined's own form has the lengths of `hyperparameters.training`.
_DETERMINEDS_LENGTHS = {
    "max_length": "searcher.max_length",
    "validation_period": "min_validation_period",
    "checkpoint_period": "min_checkpoint_period",
}


def compose(search: Mapping[str, Any], sampled: Mapping[str, Any], context: Path) -> dict[str, Any]:
    """One complete experiment configuration, to be given to `config.experiment.parse`.

    Args:
        search: The configuration of the search, with its search spaces.
        sampled: A value for every hyperparameter of the search, nested as there, as a cluster hands
            it over.
        context: The context directory; `hyperparameters.experiment` is a path inside it.

    Raises:
        ConfigError: if the experiment is missing, outside the context, or itself a search, or the
            seed is none.
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
    composed["hyperparameters"] = _laid_over(_fitting(base["hyperparameters"], changes), changes)
    composed["data"] = _laid_over(base.get("data") or {}, search.get("data") or {})
    if "trial" not in composed["hyperparameters"]:
        composed["entrypoint"] = base.get("entrypoint")
    if seed is not None:
        reproducibility = {**(search.get("reproducibility") or {}), "experiment_seed": seed}
        composed["reproducibility"] = reproducibility
    return composed


def _with_determineds_keys(
    search: Mapping[str, Any], base: Mapping[str, Any], training: object
) -> dict[str, Any]:
    """`search` with the keys of Determined's form that the experiment has.

    Args:
        search: The search; where it has such a key itself, it stays.
        base: The experiment.
        training: Lengths of the search, in our form; they go before the experiment's.

    Raises:
        ConfigError: if Determined's form has no place for something in `training`.
    """
    composed: dict[str, Any] = copy.deepcopy(dict(search))
    for path, default, _ in WITHOUT_EFFECT:
        value = value_at(base, path)
        if value is not None and value_at(search, path) in (None, default):
            _put(composed, path, value)
    given = training if isinstance(training, Mapping) else {}
    problems = []
    for key, length in given.items():
        batches = length.get("batches") if isinstance(length, Mapping) else None
        if key in _DETERMINEDS_LENGTHS:
            _put(composed, _DETERMINEDS_LENGTHS[key], length)
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


def _put(config: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config[key] = dict(config.get(key) or {})
        config = config[key]
    config[last] = value


def _check_metric(search: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """A comparison trains what the experiment does, and that reports the experiment's metric."""
    ours, theirs = (section.get("searcher") or {} for section in (search, base))
    problems = [
        f"searcher.{key}: got {ours.get(key)!r}, but the experiment has {theirs[key]!r}; allowed: "
        f"the same, by --config searcher.{key}={json.dumps(theirs[key])}"
        for key in ("metric", "smaller_is_better")
        if key in theirs and ours.get(key) != theirs[key]
    ]
    if problems:
        raise ConfigError("search", problems)


def _fitting(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """`base` without its scaler settings, if `changes` choose a precision that has no scaler."""
    section, changed = base.get("amp"), changes.get("amp")
    if not (isinstance(section, Mapping) and isinstance(changed, Mapping)):
        return base
    if changed.get("precision") in (None, Precision.AMP_FP16.value):
        return base
    kept = {key: value for key, value in section.items() if key not in SCALER_KEYS}
    return {**base, "amp": kept}


def _chosen_seed(sampled: Mapping[str, Any]) -> int | None:
    """The seed that a search gives to a trial; None if it leaves that to chance.

    Raises:
        ConfigError: if it is no 32-bit seed, which is what Determined and NumPy take.
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


def _laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section; a length, one number in a unit, is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        is_length = both and value and _LENGTH_UNITS.issuperset(value)
        merged[key] = _laid_over(below or {}, value) if both and not is_length else value
    return merged


def _round_init_scale(
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
