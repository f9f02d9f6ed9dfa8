"""Runs a trial in Determined's `Trainer` as its experiment configuration says."""

from __future__ import annotations

from typing import Any

import determined as det
import torch
from determined import pytorch

from determined_amp.amp.errors import ConfigError, Problems
from determined_amp.amp.plain_data import Config
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.failures import ending_the_program
from determined_amp.experiment.hyperparameters import constants
from determined_amp.experiment.misplaced import misplaced
from determined_amp.experiment.overrides import for_test
from determined_amp.experiment.sections import (
    CommonHyperparameters,
    Platform,
    read_sections,
)
from determined_amp.experiment.training import missing_length
from determined_amp.trial.controller import safe_loop
from determined_amp.trial.determined_private import (
    aggregation_frequency,
    amp_of,
    sections,
)


@ending_the_program()
def fit(
    trial: pytorch.PyTorchTrial, context: pytorch.PyTorchTrialContext, **options: Any
) -> None:
    """Train to the end, or until the platform asks to stop.

    The arguments of `pytorch.Trainer.fit` come from the experiment configuration, in
    our form (`hyperparameters.training`) or in Determined's own (`searcher.max_length`,
    `min_validation_period` and the like). On a cluster the run continues from its
    latest checkpoint. The loop is a `SafeController`.

    Args:
        trial: The trial.
        context: Its context.
        options: Arguments of `pytorch.Trainer.fit` that replace those of the
            configuration.

    Raises:
        ConfigError: if the configuration is wrong.
        AuditError: if the first batch is not computed in the configured precision.
        GuardError: if the run no longer trains.
    """
    common, platform = _settings(context)
    _check_aggregation(common.aggregation_frequency, context)
    if common.training.cudnn_benchmark is not None:
        torch.backends.cudnn.benchmark = common.training.cudnn_benchmark
    given = {**_options(common, platform), **options}
    if given["max_length"] is None:
        problem = missing_length("hyperparameters.training.max_length")
        raise ConfigError("experiment configuration", [problem])
    with safe_loop():
        pytorch.Trainer(trial, context).fit(**given)


def _check_aggregation(frequency: int, context: pytorch.PyTorchTrialContext) -> None:
    """Raise if the context has another frequency: it never reads the configuration."""
    made_with = aggregation_frequency(context)
    if frequency != made_with:
        raise ConfigError(
            "experiment configuration",
            [
                f"aggregation_frequency: got {frequency}, but the context was made "
                f"with {made_with}; allowed: the same, by "
                f"pytorch.init(aggregation_frequency={frequency})"
            ],
        )


def _settings(
    context: pytorch.PyTorchTrialContext,
) -> tuple[CommonHyperparameters, Platform]:
    """The settings of the context's experiment; for a script they are read here."""
    experiment = Experiment.of(context)
    if experiment is not None:
        return experiment, experiment.platform
    config, given = sections(context)
    config = for_test({**config, "hyperparameters": constants(given)})
    # If there is a `MixedPrecision`, misplaced settings were looked for already.
    is_made = amp_of(context) is not None
    problems = Problems()
    problems.extend(misplaced({**config, "hyperparameters": {}} if is_made else config))
    without_amp = {**config["hyperparameters"], "amp": None}
    own = {**config, "hyperparameters": without_amp}
    return read_sections(own, "experiment configuration", problems)


def _options(common: CommonHyperparameters, platform: Platform) -> Config:
    training = common.training
    info = det.get_cluster_info()
    lengths = {
        "max_length": training.max_length,
        "validation_period": training.validation_period,
        "checkpoint_period": training.checkpoint_period,
        "reporting_period": training.reporting_period,
    }
    return {
        **{name: length and length.unit() for name, length in lengths.items()},
        "checkpoint_policy": platform.checkpoint_policy.value,
        "latest_checkpoint": info.latest_checkpoint if info is not None else None,
        "step_zero_validation": platform.perform_initial_validation,
        "profiling_enabled": platform.profiling.enabled,
    }
