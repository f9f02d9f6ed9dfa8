"""Runs the finder on the experiment that a search searches over."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined_amp.finder.advice import FoundScale
from determined_amp.finder.find import look
from determined_amp.local.alone import open_trial
from determined_amp.reports.sources import Search, is_scale, nested
from determined_amp.search.compose import compose

# What the finder, too, needs of a configuration; a master fills in more.
_SECTIONS = ("name", "entrypoint", "data", "hyperparameters", "searcher", "reproducibility")


def predict(search: Search, batches: int = 4) -> FoundScale:
    """What the finder says of the experiment under a search, with the seed of the search.

    Args:
        search: Where something else than the scale is searched, its first trial counts.
        batches: Training batches to look at.

    Raises:
        ConfigError: if the experiment is not here, or is wrong.
        LossScaleError: if it has no loss scale.
    """
    config = _experiment(search)
    with open_trial(config, search.origin) as found:
        return FoundScale(*look(search.name, found.trial, found.context, batches))


def _experiment(search: Search) -> dict[str, Any]:
    """The experiment with a scale of its own, not one of those that were tried."""
    sample = search.rows[0].hparams
    plain = {key: search.config[key] for key in _SECTIONS if search.config.get(key) is not None}
    frequency = (search.config.get("optimizations") or {}).get("aggregation_frequency", 1)
    if frequency > 1:  # of a trial of the user's own; ours has a hyperparameter for it
        plain["optimizations"] = {"aggregation_frequency": frequency}
    if "experiment" not in sample:
        return {**plain, "hyperparameters": nested(sample)}
    constant = nested({name: value for name, value in sample.items() if not is_scale(name)})
    return compose({**plain, "hyperparameters": constant}, constant, Path.cwd())


def counted(search: Search, found: FoundScale) -> float:
    """Samples that a search passed through the model, forward and backward.

    A trained trial passes each sample once. A scored one passes its batches four times: in
    bfloat16, in float32, and in float16 with the recorder and without.
    """
    per_batch = found.run.samples / found.run.batches
    passes = sum(row.batches * (4 if row.scored else 1) for row in search.rows)
    return float(passes * per_batch)


def environment_of(found: FoundScale) -> Mapping[str, Any]:
    """What the finder ran on."""
    return {
        name: vars(found.run)[name] for name in ("device", "torch", "date", "batches", "samples")
    }
