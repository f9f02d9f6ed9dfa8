"""Reads the sections of a configuration that mean the same in every trial.

Determined's own sections are in `Platform`, as far as we read them. The hyperparameters
that every trial has are in `CommonHyperparameters`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from determined_amp.amp.errors import Problem, Problems
from determined_amp.amp.fields import read, setting
from determined_amp.amp.plain_data import Config
from determined_amp.amp.settings import AmpSettings
from determined_amp.experiment.hyperparameters import ranges
from determined_amp.experiment.training import (
    TrainingSettings,
    in_our_form,
    in_the_words_of,
    mistakes_of_our_form,
)

_ONE_VALUE = (
    "got a range to search; allowed: one value, for instance by --config {}=VALUE, or "
    "all of them by det-amp search"
)


class CheckpointPolicy(enum.Enum):
    """After which validations Determined saves a checkpoint."""

    BEST = "best"
    ALL = "all"
    NONE = "none"


@dataclass(frozen=True)
class Searcher:
    """The search method and the metric that ranks trials and checkpoints.

    Without a metric there is no best checkpoint.
    """

    READ_IN_PART = True

    metric: str | None = setting(None)
    smaller_is_better: bool = setting(True)
    name: str = setting("single")


@dataclass(frozen=True)
class Reproducibility:
    """`experiment_seed` seeds a local run; a cluster derives the seed of each trial
    from it.
    """

    READ_IN_PART = True

    experiment_seed: int = setting(0, at_least=0, at_most=2**32 - 1)


@dataclass(frozen=True)
class Resources:
    """`slots_per_trial` is the number of processes that the experiment requests on a
    cluster.
    """

    READ_IN_PART = True

    slots_per_trial: int = setting(1, at_least=0)


@dataclass(frozen=True)
class Profiling:
    """`enabled` starts Determined's system profiler on a cluster."""

    READ_IN_PART = True

    enabled: bool = setting(False)


@dataclass(frozen=True)
class Optimizations:
    """Whether Determined averages the gradients over the batches of a step."""

    READ_IN_PART = True

    average_aggregated_gradients: bool = setting(True)


@dataclass(frozen=True)
class Platform:
    """Determined's own keys of an experiment configuration, as far as we read them."""

    READ_IN_PART = True

    searcher: Searcher = setting(Searcher())
    reproducibility: Reproducibility = setting(Reproducibility())
    name: str = setting("unnamed")
    resources: Resources = setting(Resources())
    profiling: Profiling = setting(Profiling())
    checkpoint_policy: CheckpointPolicy = setting(CheckpointPolicy.BEST)
    perform_initial_validation: bool = setting(False)
    optimizations: Optimizations = setting(Optimizations())


@dataclass(frozen=True)
class CommonHyperparameters:
    """The hyperparameters that mean the same in every trial."""

    READ_IN_PART = True

    training: TrainingSettings = setting(TrainingSettings())  # lengths and periods
    aggregation_frequency: int = setting(1, at_least=1)  # batches per optimizer step
    # Number of samples in a batch, over all slots; None if the YAML has none.
    global_batch_size: int | None = setting(None, at_least=1)
    amp: AmpSettings | None = setting(None)  # the section `amp`; None if there is none
    trial_seed: int | None = setting(None, at_least=0, at_most=2**32 - 1)


def read_sections(
    config: Config, source: str, problems: Problems
) -> tuple[CommonHyperparameters, Platform]:
    """The settings of a configuration that mean the same in every trial.

    Args:
        config: The experiment configuration of one trial, in either form.
        source: The name of the configuration, for the error message.
        problems: Mistakes that are known already.

    Raises:
        ConfigError: naming every mistake.
    """
    values = config["hyperparameters"]
    platform = read(Platform, config, "", problems)
    searched = [f"hyperparameters.{name}" for name in ranges(values)]
    problems.extend(Problem(name, _ONE_VALUE.format(name)) for name in searched)
    problems.extend(mistakes_of_our_form(config))
    found: list[Problem] = []
    ours = in_our_form(config)
    common = read(CommonHyperparameters, ours, "hyperparameters", found)
    problems.extend(in_the_words_of(config, problem) for problem in found)
    size = values.get("global_batch_size")
    if platform is not None and isinstance(size, int):
        problems.extend(indivisible_batch(size, platform.resources.slots_per_trial))
    problems.raise_from(source)
    assert platform is not None
    assert common is not None
    return common, platform


def indivisible_batch(global_batch_size: int, slots: int) -> Iterator[Problem]:
    """A problem if the slots cannot share the batch evenly; Determined would shrink the
    batch.
    """
    if global_batch_size % max(slots, 1):
        yield Problem(
            "hyperparameters.global_batch_size",
            f"got {global_batch_size}, which does not divide among {slots} slots; "
            f"allowed: a multiple of {slots}",
        )
