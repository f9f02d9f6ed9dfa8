"""Takes the place of the master for a local run: writes and shows what a trial reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from determined import core

from determined_amp.config.experiment import Experiment
from determined_amp.local.display import Display
from determined_amp.local.folder import RunFolder


class Follower:
    """Is told what a run folder receives; this one makes nothing of it."""

    @contextmanager
    def following(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Follow meanwhile.

        Args:
            stopped: Whether the run was asked to stop, to be resumed later.
        """
        yield

    def reported(self, line: Mapping[str, Any]) -> None:
        """A line was added to `metrics.jsonl`."""

    def progressed(self, share: float) -> None:
        """This share of the run is done, 0 to 1."""

    def saved(self, checkpoints: Sequence[Path]) -> None:
        """These checkpoints are in the folder now."""


class LocalReports(core.DummyTrainContext):
    """Determined's reporting interface, into a run folder and onto the terminal.

    Only the chief reports; give the other ranks a plain `core.DummyTrainContext`.

    Args:
        folder: Where `metrics.jsonl` and the event files go.
        display: What the user sees.
        experiment: Says which validation metric is the best, and in which direction.
        follower: Is told of everything.
    """

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        experiment: Experiment[Any],
        follower: Follower,
    ) -> None:
        super().__init__(tensorboard_path=folder.tensorboard)
        self._folder = folder
        self._display = display
        self._follower = follower
        self._metric = experiment.platform.searcher.metric
        self._smaller_is_better = experiment.platform.searcher.smaller_is_better
        self._best: tuple[float, int] | None = None  # value, batches
        self._last_validation: int | None = None
        for line in folder.read_metrics():
            if line["group"] == "validation":
                self._note_validation(line["batches"], line)

    def is_best(self, batches: int) -> bool:
        """Whether the validation after that many batches is the best so far."""
        return self._best is not None and self._best[1] == batches

    def get_experiment_best_validation(self) -> float | None:
        return self._best[0] if self._best else None

    def _get_last_validation(self) -> int | None:
        return self._last_validation

    def set_status(self, status: str) -> None:
        self._display.status(status)

    def report_progress(self, progress: float) -> None:
        self._follower.progressed(progress)  # the display counts batches

    def saved(self, checkpoints: Sequence[Path]) -> None:
        """These checkpoints are in the folder now."""
        self._follower.saved(checkpoints)

    def _report_trial_metrics(
        self,
        group: str,
        steps_completed: int,
        metrics: dict[str, Any],
        batch_metrics: list[dict[str, Any]] | None = None,
    ) -> None:
        numbers = {name: _number(value) for name, value in metrics.items()}
        line = {"group": "", **numbers} | {"group": group, "batches": steps_completed}
        self._folder.append_metrics(line)
        self._follower.reported(line)
        self._display.report(group, steps_completed, numbers)
        if group == "validation":
            self._note_validation(steps_completed, numbers)

    def _note_validation(self, batches: int, metrics: dict[str, Any]) -> None:
        self._last_validation = batches
        value = metrics.get(self._metric) if self._metric is not None else None
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        if self._best is None or (value < self._best[0]) is self._smaller_is_better:
            self._best = (float(value), batches)


def _number(value: Any) -> Any:
    """A plain number of a numpy scalar; anything that is no number as text."""
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (int, float)) else str(value)
