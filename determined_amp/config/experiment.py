"""One experiment YAML as one typed object, parsed once, with every mistake named.

Determined 0.38.1 reads some keys only for its legacy entrypoints. A script that calls
`pytorch.Trainer`, as ours does, must pass them itself, and what such a key says has no effect. So
these knobs live under `hyperparameters`, where `train` reads them, and a YAML that sets the
place without effect is an error.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import yaml
from determined import pytorch

from determined_amp.config.hparams import Hparams
from determined_amp.config.overrides import NOT_YAML
from determined_amp.config.settings import ConfigError, read, setting
from trials.data.images import DataSettings

H_co = TypeVar("H_co", bound=Hparams, covariant=True)


class CheckpointPolicy(enum.Enum):
    """Which validations are followed by a checkpoint."""

    BEST = "best"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class Searcher:
    """The search method, and what ranks trials and checkpoints: a metric and its direction."""

    metric: str = setting()
    smaller_is_better: bool = setting()
    name: str = setting("single")


@dataclass(frozen=True)
class Reproducibility:
    """`experiment_seed` seeds a local run; on a cluster each trial gets a seed made from it."""

    experiment_seed: int = setting(at_least=0)


@dataclass(frozen=True)
class Resources:
    """`slots_per_trial` is how many processes the experiment asks a cluster for."""

    slots_per_trial: int = setting(1, at_least=0)


@dataclass(frozen=True)
class Profiling:
    """`enabled` starts Determined's system profiler, on a cluster."""

    enabled: bool = setting(False)


@dataclass(frozen=True)
class Platform:
    """The sections of an experiment configuration that are Determined's own and concern us."""

    searcher: Searcher = setting()
    reproducibility: Reproducibility = setting()
    name: str = setting("unnamed")
    resources: Resources = setting(Resources())
    profiling: Profiling = setting(Profiling())
    checkpoint_policy: CheckpointPolicy = setting(CheckpointPolicy.BEST)


@dataclass(frozen=True)
class Experiment(Generic[H_co]):
    """What `determined_amp.train` needs of an experiment configuration.

    Args:
        platform: Determined's own sections.
        data: The `data` section, of the trial's own class `Data`: by default `DataSettings`.
        hparams: The `hyperparameters` section, of the trial's own class `Hparams`.
    """

    platform: Platform
    data: Any
    hparams: H_co

    @property
    def name(self) -> str:
        return self.platform.name

    @property
    def seed(self) -> int:
        """Seed of a local run."""
        return self.platform.reproducibility.experiment_seed


# Keys without effect on a script entrypoint: (where, what the master fills in, what to do instead).
_WITHOUT_EFFECT: tuple[tuple[str, object, str], ...] = (
    ("searcher.max_length", None, "hyperparameters.training.max_length"),
    ("min_validation_period", {"batches": 0}, "hyperparameters.training.validation_period"),
    ("min_checkpoint_period", {"batches": 0}, "hyperparameters.training.checkpoint_period"),
    ("scheduling_unit", 100, "hyperparameters.training.reporting_period"),
    ("records_per_epoch", 0, "hyperparameters.training in batches or epochs"),
    ("perform_initial_validation", False, "nothing: determined_amp.train validates by its periods"),
    ("optimizations.aggregation_frequency", 1, "hyperparameters.aggregation_frequency"),
    ("optimizations.average_aggregated_gradients", True, "nothing: gradients are averaged"),
    ("optimizations.gradient_compression", False, "nothing: it is for Horovod only"),
    ("optimizations.average_training_metrics", True, "nothing: metrics are exact over ranks"),
    ("optimizations.mixed_precision", "O0", "hyperparameters.amp.precision"),
    ("optimizations.auto_tune_tensor_fusion", False, "nothing: it is for Horovod only"),
    ("optimizations.tensor_fusion_threshold", 64, "nothing: it is for Horovod only"),
    ("optimizations.tensor_fusion_cycle_time", 1, "nothing: it is for Horovod only"),
    ("optimizations.grad_updates_size_file", None, "nothing: it is for Horovod only"),
)


def read_yaml(path: str) -> Mapping[str, Any]:
    """The experiment configuration in a YAML file.

    Raises:
        ConfigError: if the file is missing, not YAML, or not a mapping.
    """
    try:
        with open(path) as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(path, [f"cannot be read: {error.strerror}"]) from error
    except NOT_YAML as error:
        raise ConfigError(path, [f"is not YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(config, Mapping):
        raise ConfigError(path, ["is not an experiment configuration: its top level has no keys"])
    return config


def parse(
    config: Mapping[str, Any],
    source: str,
    *,
    hyperparameters: Mapping[str, Any] | None = None,
    completed_by_master: bool = False,
) -> Experiment[Hparams]:
    """Check a whole configuration and give it types.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for the error message.
        hyperparameters: What the searcher chose for this trial; by default those of `config`.
        completed_by_master: Whether a master has filled in its defaults, which are then no mistake.

    Raises:
        ConfigError: naming every mistake.
    """
    problems: list[str] = []
    raw_hparams = config.get("hyperparameters", {}) if hyperparameters is None else hyperparameters
    trial_class = _trial_class(raw_hparams, problems)
    hparams_class = getattr(trial_class, "Hparams", Hparams)
    # Without its class a trial's own keys are unknown, which is no mistake of theirs.
    hparams = None if problems else read(hparams_class, raw_hparams, "hyperparameters", problems)
    raw_data = {} if config.get("data") is None else config["data"]
    data = read(getattr(trial_class, "Data", DataSettings), raw_data, "data", problems)
    platform = read(Platform, config, "", problems, strict=False)
    problems.extend(_settings_without_effect(config, completed_by_master))
    if hparams is not None and platform is not None:
        slots = platform.resources.slots_per_trial
        problems.extend(indivisible_batch(hparams.global_batch_size, slots))
    if problems or hparams is None or data is None or platform is None:
        raise ConfigError(source, problems)
    return Experiment(platform, data, hparams)


def of_context(context: pytorch.PyTorchTrialContext) -> Experiment[Any]:
    """The experiment of a trial that was made from its context alone.

    Raises:
        ConfigError: naming every mistake.
    """
    return parse(
        context.get_experiment_config(),
        "experiment configuration",
        hyperparameters=context.get_hparams(),
        completed_by_master=True,
    )


def load_trial_class(import_path: str) -> Callable[..., pytorch.PyTorchTrial]:
    """The trial class at `module:Class`.

    Raises:
        ValueError: if there is none, saying what was found instead.
    """
    module_name, _, class_name = import_path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"got {import_path!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, pytorch.PyTorchTrial)):
        raise ValueError(  # noqa: TRY004 - a key has a wrong value
            f"got {import_path!r}, which is not a PyTorchTrial"
        )
    trial_class: Callable[..., pytorch.PyTorchTrial] = found
    return trial_class


def indivisible_batch(global_batch_size: int, slots: int) -> Iterator[str]:
    """The sentence that says so if the batch does not divide; Determined would shrink it."""
    if global_batch_size % max(slots, 1):
        yield (
            f"hyperparameters.global_batch_size: got {global_batch_size}, which does not divide "
            f"among {slots} slots; allowed: a multiple of {slots}"
        )


def _trial_class(raw: object, problems: list[str]) -> Callable[..., pytorch.PyTorchTrial] | None:
    import_path = raw.get("trial") if isinstance(raw, Mapping) else None
    if not isinstance(import_path, str):
        return None
    try:
        return load_trial_class(import_path)
    except ValueError as error:
        problems.append(f"hyperparameters.trial: {error}; allowed: module:Class of a PyTorchTrial")
        return None


def _settings_without_effect(config: Mapping[str, Any], completed: bool) -> Iterator[str]:
    for path, default, instead in _WITHOUT_EFFECT:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None or (completed and value == default):
            continue
        yield f"{path}: got {value!r}, which has no effect in Determined 0.38.1; use {instead}"
