"""One experiment YAML as one typed object, parsed once, with every mistake named.

Determined 0.38.1 reads some keys only for its legacy entrypoints. A script that calls
`pytorch.Trainer`, as ours does, must pass them itself, and what such a key says has no effect. So
these knobs live under `hyperparameters`, where `trials.train` reads them, and a YAML that sets the
place without effect is an error.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import yaml
from determined import pytorch

from trials.amp import AmpSettings
from trials.data import DataSettings
from trials.schedule import LRSchedule, learning_rates
from trials.settings import ConfigError, read, setting


@dataclass(frozen=True)
class Length:
    """A number of batches or of epochs, in Determined's own notation: `{batches: 100}`.

    Args:
        batches: Calls of `train_batch`.
        epochs: Passes over the training data.
    """

    batches: int | None = setting(None, at_least=1)
    epochs: int | None = setting(None, at_least=1)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if len(given) != 1:
            yield "batches", f"got {len(given)} units; allowed: one of batches and epochs"

    def unit(self) -> pytorch.TrainUnit:
        if self.epochs is not None:
            return pytorch.Epoch(self.epochs)
        assert self.batches is not None
        return pytorch.Batch(self.batches)

    def in_batches(self, batches_per_epoch: int) -> int:
        return self.batches or (self.epochs or 0) * batches_per_epoch


@dataclass(frozen=True)
class TrainingSettings:
    """How long, and how often what happens; script entrypoints pass these to `Trainer.fit`.

    Args:
        max_length: Length of the whole run.
        validation_period: Between validations; one always follows the last batch.
        checkpoint_period: Between checkpoints; one always follows the last batch.
        reporting_period: Between reports of training metrics.
        cudnn_benchmark: Let cuDNN time its convolution algorithms once; for inputs of fixed shape.
    """

    max_length: Length = setting()
    validation_period: Length = setting()
    checkpoint_period: Length = setting()
    reporting_period: Length = setting()
    cudnn_benchmark: bool = setting(True)


@dataclass(frozen=True)
class Hparams:
    """The hyperparameters that every trial has; a trial adds its own in a subclass.

    Args:
        trial: Import path of the trial class, `module:Class`.
        global_batch_size: Samples of one batch over all slots.
        learning_rate: Peak of the schedule.
        amp: Precision and loss scale.
        training: Lengths and periods.
        aggregation_frequency: Batches per optimizer step; gradients are averaged over them.
        lr_schedule: Shape after the warm-up; advances on applied steps only.
        warmup_steps: Optimizer steps.
        weight_decay: As the optimizer defines it.
        max_grad_norm: Clip the unscaled gradient to this 2-norm; left out, nothing is clipped.
    """

    trial: str = setting()
    global_batch_size: int = setting(at_least=1)
    learning_rate: float = setting(above=0)
    amp: AmpSettings = setting()
    training: TrainingSettings = setting()
    aggregation_frequency: int = setting(1, at_least=1)
    lr_schedule: LRSchedule = setting(LRSchedule.CONSTANT)
    warmup_steps: int = setting(0, at_least=0)
    weight_decay: float = setting(0.0, at_least=0)
    max_grad_norm: float | None = setting(None, above=0)

    def rates(self, batches_per_epoch: int) -> list[float]:
        """The learning rate of every optimizer step of the run."""
        batches = self.training.max_length.in_batches(batches_per_epoch)
        steps = math.ceil(batches / self.aggregation_frequency)
        return learning_rates(self.lr_schedule, self.learning_rate, self.warmup_steps, steps)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        training = self.training
        for name in ("max_length", "validation_period", "checkpoint_period"):
            batches = getattr(training, name).batches
            if batches is not None and batches % self.aggregation_frequency:
                # Accumulated gradients are not in a checkpoint: half a window would be lost.
                yield (
                    f"training.{name}.batches",
                    f"got {batches}, which is not a multiple of aggregation_frequency "
                    f"{self.aggregation_frequency}; allowed: whole accumulation windows",
                )


H_co = TypeVar("H_co", bound=Hparams, covariant=True)


@dataclass(frozen=True)
class Experiment(Generic[H_co]):
    """What `trials.train` needs of an experiment configuration.

    Args:
        name: Name of the experiment.
        seed: Seed of a local run; a cluster gives each trial its own.
        slots_per_trial: Processes the experiment asks for.
        searcher_metric: Validation metric that ranks checkpoints.
        smaller_is_better: Direction of it.
        checkpoint_policy: `best`, `all` or `none`: which validations are followed by a checkpoint.
        profiling: Whether Determined's system profiler runs.
        data: The `data` section.
        hparams: The `hyperparameters` section, of the trial's own class.
    """

    name: str
    seed: int
    slots_per_trial: int
    searcher_metric: str
    smaller_is_better: bool
    checkpoint_policy: str
    profiling: bool
    data: DataSettings
    hparams: H_co


# Keys without effect on a script entrypoint: (where, what the master fills in, what to do instead).
_WITHOUT_EFFECT: tuple[tuple[str, object, str], ...] = (
    ("searcher.max_length", None, "hyperparameters.training.max_length"),
    ("min_validation_period", {"batches": 0}, "hyperparameters.training.validation_period"),
    ("min_checkpoint_period", {"batches": 0}, "hyperparameters.training.checkpoint_period"),
    ("scheduling_unit", 100, "hyperparameters.training.reporting_period"),
    ("records_per_epoch", 0, "hyperparameters.training in batches or epochs"),
    ("perform_initial_validation", False, "nothing: trials.train validates by its periods"),
    ("optimizations.aggregation_frequency", 1, "hyperparameters.aggregation_frequency"),
    ("optimizations.average_aggregated_gradients", True, "nothing: gradients are averaged"),
    ("optimizations.gradient_compression", False, "nothing: it is for Horovod only"),
    ("optimizations.average_training_metrics", True, "nothing: metrics are exact over ranks"),
    ("optimizations.mixed_precision", "O0", "hyperparameters.amp.precision"),
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
    except yaml.YAMLError as error:
        raise ConfigError(path, [f"is not YAML: {error}"]) from error
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
    hparams = read(hparams_class, raw_hparams, "hyperparameters", problems)
    data = read(DataSettings, config.get("data") or {}, "data", problems)
    problems.extend(_settings_without_effect(config, completed_by_master))
    searcher, slots = config.get("searcher") or {}, _slots(config)
    for key in ("metric", "smaller_is_better"):
        if key not in searcher:
            problems.append(f"searcher.{key}: missing; checkpoints are ranked by it")
    seed = (config.get("reproducibility") or {}).get("experiment_seed")
    if not isinstance(seed, int):
        problems.append(f"reproducibility.experiment_seed: got {seed!r}; allowed: an integer")
    if hparams is not None:
        problems.extend(indivisible_batch(hparams.global_batch_size, slots))
    if problems or hparams is None or data is None or not isinstance(seed, int):
        raise ConfigError(source, problems)
    return Experiment(
        name=str(config.get("name") or source),
        seed=seed,
        slots_per_trial=slots,
        searcher_metric=str(searcher["metric"]),
        smaller_is_better=bool(searcher["smaller_is_better"]),
        checkpoint_policy=str(config.get("checkpoint_policy") or "best"),
        profiling=bool((config.get("profiling") or {}).get("enabled")),
        data=data,
        hparams=hparams,
    )


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
    except (ImportError, AttributeError, ValueError) as error:
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


def _slots(config: Mapping[str, Any]) -> int:
    slots = (config.get("resources") or {}).get("slots_per_trial")
    return 1 if slots is None else int(slots)


def _settings_without_effect(config: Mapping[str, Any], completed: bool) -> Iterator[str]:
    for path, default, instead in _WITHOUT_EFFECT:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None or (completed and value == default):
            continue
        yield f"{path}: got {value!r}, which has no effect in Determined 0.38.1; use {instead}"
