"""Whether the precisions of an experiment can be compared; read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.experiment.failures import MISSING_BATCH_SIZE

if TYPE_CHECKING:
    # it needs PyYAML, which the doctor of a loop does without
    from determined_amp.experiment.experiment import Experiment


def check_comparable(experiment: Experiment, batches: int | None) -> None:
    """Check that an experiment can be compared, in runs of so many batches.

    Raises:
        ConfigError: naming every reason why it cannot.
    """
    problems = list(_mistakes(experiment, batches))
    if problems:
        raise ConfigError(experiment.source, problems)


def _mistakes(experiment: Experiment, batches: int | None) -> Iterator[Problem]:
    if experiment.global_batch_size is None:
        yield MISSING_BATCH_SIZE
    window = experiment.aggregation_frequency
    if batches is not None and batches % window:
        text = (
            f"got {batches}; allowed: a multiple of aggregation_frequency, such as "
            f"{-(-batches // window) * window}: a step has {window} batches"
        )
        yield Problem("--batches", text)
