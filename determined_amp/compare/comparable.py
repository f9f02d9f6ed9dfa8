"""Checks without torch whether the precisions of an experiment can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from determined_amp.amp.errors import Problem, Problems
from determined_amp.experiment.failures import MISSING_BATCH_SIZE

if TYPE_CHECKING:
    # This import needs PyYAML, and the doctor of a loop must work without it.
    from determined_amp.experiment.experiment import Experiment

# The first ten batches of a process report no speed, so a shorter run may have none.
LEAST_BATCHES = 20


def check_comparable(experiment: Experiment, batches: int | None) -> None:
    """Check that an experiment can be compared, in runs of `batches` batches if given.

    Raises:
        ConfigError: naming every reason why it cannot.
    """
    problems = Problems()
    if experiment.global_batch_size is None:
        problems.append(MISSING_BATCH_SIZE)
    window = experiment.aggregation_frequency
    if batches is not None and batches % window:
        text = (
            f"got {batches}; allowed: a multiple of aggregation_frequency, such as "
            f"{-(-batches // window) * window}: a step has {window} batches"
        )
        problems.append(Problem("--batches", text))
    problems.raise_from(experiment.source)
