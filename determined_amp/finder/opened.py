"""The trial of an experiment YAML, opened on this machine: of this repository or a user's own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import core, pytorch

from determined_amp.amp.checkpoint import CheckpointError
from determined_amp.config.experiment import load_trial_class, parse
from determined_amp.config.settings import ConfigError
from determined_amp.local.alone import core_context_alone
from determined_amp.local.run import Resume

# The entrypoint of a trial that Determined itself imports.
_LEGACY_ENTRYPOINT = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class Described:
    """What Determined and the trial's constructor need to know.

    Args:
        name: Of the experiment.
        seed: Of parameters and data.
        hyperparameters: As the trial gets them.
        aggregation_frequency: Batches per optimizer step.
        make: Makes the trial in a context.
    """

    name: str
    seed: int
    hyperparameters: dict[str, Any]
    aggregation_frequency: int
    make: Callable[[pytorch.PyTorchTrialContext], pytorch.PyTorchTrial]


def described(
    config: Mapping[str, Any],
    source: str,
    trial_path: str | None = None,
    *,
    completed_by_master: bool = False,
) -> Described:
    """The trial that an experiment configuration names.

    Args:
        config: The configuration. That of a user's own trial may hold any hyperparameters.
        source: Where it comes from, for the error message.
        trial_path: `module:Class`; by default `hyperparameters.trial`, else the entrypoint.
        completed_by_master: Whether a master has filled in its defaults.

    Raises:
        ConfigError: if the configuration is wrong or names no trial.
    """
    path = trial_path or _trial_path(config, source)
    try:
        trial_class = load_trial_class(path)
    except ValueError as error:
        raise ConfigError(source, [f"trial: {error}; allowed: module:Class"]) from error
    name = str(config.get("name", source))
    if not hasattr(trial_class, "Hparams"):
        seed = int(config.get("reproducibility", {}).get("experiment_seed", 0))
        frequency = int(config.get("optimizations", {}).get("aggregation_frequency", 1))
        return Described(name, seed, _values(config, source), frequency, trial_class)
    hyperparameters = {**config.get("hyperparameters", {}), "trial": path}
    config = {**config, "hyperparameters": hyperparameters}
    experiment = parse(config, source, completed_by_master=completed_by_master)
    return Described(
        name,
        experiment.seed,
        hyperparameters,
        experiment.hparams.aggregation_frequency,
        lambda context: trial_class(context, experiment),
    )


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
    """Make the trial that an experiment configuration names, in one process on this machine.

    Args:
        config: See `described`.
        source: See `described`.
        trial_path: See `described`.
        checkpoint: A checkpoint to start from, or a run folder, whose newest is taken.

    Raises:
        ConfigError: if the configuration is wrong or names no trial.
        CheckpointError: if there is no checkpoint.
    """
    description = described(config, source, trial_path)
    folder = None if checkpoint is None else _checkpoint_folder(checkpoint)
    parent, name = (None, None) if folder is None else (folder.parent, folder.name)
    with core_context_alone(parent) as core_context:
        context = _context(core_context, config, description)
        yield Opened(description.make(context), context, name)


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


def _context(
    core_context: core.Context, config: Mapping[str, Any], description: Described
) -> pytorch.PyTorchTrialContext:
    """What `pytorch.init` makes on a cluster, seeds included."""
    for set_seed in (random.seed, np.random.seed, torch.random.manual_seed):
        set_seed(description.seed)
    return pytorch.PyTorchTrialContext(
        core_context=core_context,
        trial_seed=description.seed,
        hparams=description.hyperparameters,
        slots_per_trial=1,
        num_gpus=torch.cuda.device_count(),
        exp_conf=dict(config),
        aggregation_frequency=description.aggregation_frequency,
        steps_completed=0,
        managed_training=True,
        debug_enabled=False,
    )


def _values(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Hyperparameters as a trial gets them: constants only.

    Raises:
        ConfigError: naming every one that is a range to search.
    """
    problems: list[str] = []
    values = _constants(config.get("hyperparameters", {}), "hyperparameters", problems)
    if problems:
        raise ConfigError(source, problems)
    return values


def _constants(given: Mapping[str, Any], path: str, problems: list[str]) -> dict[str, Any]:
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
            values[key] = _constants(value, f"{path}.{key}", problems)
        else:
            values[key] = value
    return values
