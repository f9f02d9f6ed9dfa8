"""The trial of an experiment YAML, opened on this machine: of this repository or a user's own."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import core, pytorch

from trials.checkpoint import CheckpointError
from trials.experiment import load_trial_class, parse
from trials.local.alone import core_context_alone, trial_alone
from trials.local.run import Resume
from trials.settings import ConfigError

# The entrypoint of a trial that Determined itself imports.
_LEGACY_ENTRYPOINT = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class Opened:
    """A trial that has not trained yet.

    Args:
        trial: The trial.
        context: Its context.
        latest_checkpoint: What `Trainer.fit` starts from.
    """

    trial: pytorch.PyTorchTrial
    context: pytorch.PyTorchTrialContext
    latest_checkpoint: str | None


@contextmanager
def opened(
    config: Mapping[str, Any],
    source: str,
    trial_path: str | None = None,
    checkpoint: Path | None = None,
) -> Iterator[Opened]:
    """Make the trial that an experiment configuration names.

    Args:
        config: The configuration. That of a user's own trial may hold any hyperparameters.
        source: Where it comes from, for the error message.
        trial_path: `module:Class`; by default `hyperparameters.trial`, else the entrypoint.
        checkpoint: A checkpoint to start from, or a run folder, whose newest is taken.

    Raises:
        ConfigError: if the configuration is wrong or names no trial.
        CheckpointError: if there is no checkpoint.
    """
    path = trial_path or _trial_path(config, source)
    folder = None if checkpoint is None else _checkpoint_folder(checkpoint)
    start = None if folder is None else folder.name
    parent = None if folder is None else folder.parent
    try:
        trial_class = load_trial_class(path)
    except ValueError as error:
        raise ConfigError(source, [f"trial: {error}; allowed: module:Class"]) from error
    if hasattr(trial_class, "Hparams"):
        hyperparameters = {**config.get("hyperparameters", {}), "trial": path}
        config = {**config, "hyperparameters": hyperparameters}
        with trial_alone(config, parse(config, source), parent) as (trial, context):
            yield Opened(trial, context, start)
    else:
        with core_context_alone(parent) as core_context:
            context = _plain_context(core_context, config, source)
            yield Opened(trial_class(context), context, start)


def _trial_path(config: Mapping[str, Any], source: str) -> str:
    hyperparameters = config.get("hyperparameters")
    named = hyperparameters.get("trial") if isinstance(hyperparameters, Mapping) else None
    entrypoint = config.get("entrypoint")
    if isinstance(named, str):
        return named
    if isinstance(entrypoint, str) and _LEGACY_ENTRYPOINT.fullmatch(entrypoint):
        return entrypoint
    raise ConfigError(
        source,
        ["names no trial; give hyperparameters.trial: module:Class, or --trial module:Class"],
    )


def _checkpoint_folder(path: Path) -> Path:
    if (path / "state_dict.pth").exists():
        return path.absolute()
    if (path / "checkpoints").is_dir():
        return (path / "checkpoints" / Resume.latest(path).checkpoint).absolute()
    raise CheckpointError(
        f"{path}: got neither a checkpoint (a folder with state_dict.pth) nor a run folder"
    )


def _plain_context(
    core_context: core.Context, config: Mapping[str, Any], source: str
) -> pytorch.PyTorchTrialContext:
    """The context of a trial whose hyperparameters are nobody's business but its own."""
    seed = int(config.get("reproducibility", {}).get("experiment_seed", 0))
    for set_seed in (random.seed, np.random.seed, torch.random.manual_seed):
        set_seed(seed)
    frequency = int(config.get("optimizations", {}).get("aggregation_frequency", 1))
    problems: list[str] = []
    hyperparameters = _values(config.get("hyperparameters", {}), "hyperparameters", problems)
    if problems:
        raise ConfigError(source, problems)
    return pytorch.PyTorchTrialContext(
        core_context=core_context,
        trial_seed=seed,
        hparams=hyperparameters,
        slots_per_trial=1,
        num_gpus=torch.cuda.device_count(),
        exp_conf=dict(config),
        aggregation_frequency=frequency,
        steps_completed=0,
        managed_training=True,
        debug_enabled=False,
    )


def _values(given: Mapping[str, Any], path: str, problems: list[str]) -> dict[str, Any]:
    """Hyperparameters as a trial gets them: constants only."""
    values: dict[str, Any] = {}
    for key, value in given.items():
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "const":
            values[key] = value.get("val")
        elif kind in ("int", "double", "log", "categorical"):
            problems.append(
                f"{path}.{key}: got a range to search; allowed: one value, for instance by "
                f"--config {path}.{key}=VALUE"
            )
        elif isinstance(value, Mapping):
            values[key] = _values(value, f"{path}.{key}", problems)
        else:
            values[key] = value
    return values
