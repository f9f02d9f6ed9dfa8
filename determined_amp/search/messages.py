"""What a search and its workers say to each other."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.search.trial_kind import TrialKind


@dataclass(frozen=True)
class Job:
    """One trial to run.

    Args:
        kind: What it does.
        config: Its experiment configuration.
        folder: Its run folder; a trial that left a checkpoint there goes on from it.
    """

    kind: TrialKind
    config: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True)
class Validation:
    """A report of a running trial; answered with whether it is to go on.

    Args:
        batches: Batches trained before it.
        metrics: By name; finite numbers only.
    """

    batches: int
    metrics: Mapping[str, float]


class Outcome(enum.Enum):
    """How a trial ended: to its end, by early stopping, by a signal, or without a result."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"
    INVALID = "invalid"
    FAILED = "failed"


@dataclass(frozen=True)
class Ended:
    """The last word of a trial.

    Args:
        outcome: `INVALID` means that these hyperparameters cannot train.
        training: The last training metrics.
        reason: Why it is invalid or failed.
    """

    outcome: Outcome
    training: Mapping[str, float] | None = None
    reason: str | None = None


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a report: these can be compared, and stored in any database."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }
