"""Checks without torch whether the precisions of an experiment can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from determined_amp.amp.errors import Problem, Problems
from determined_amp.amp.settings import Precision
from determined_amp.experiment.failures import MISSING_BATCH_SIZE

if TYPE_CHECKING:
    # This import needs PyYAML, and the doctor of a loop must work without it.
    from determined_amp.experiment.experiment import Experiment

# The first ten batches of a process report no speed, so a shorter run may have none.
LEAST_BATCHES = 20


@dataclass(frozen=True)
class ComparisonRequest:
    """What the user asks of a comparison."""

    precisions: Sequence[Precision]
    seeds: int  # number of runs in each precision
    batches: int | None  # length of each run; None: as many as fit into the time
    minutes: int  # time for all runs
    words: Sequence[str]  # what was typed behind the name of the program


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
