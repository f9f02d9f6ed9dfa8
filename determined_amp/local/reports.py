"""Takes the place of the master for a local run: writes what a trial reports, tells listeners."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from determined import core

from determined_amp.config.experiment import Experiment
from determined_amp.local.folder import RunFolder
from determined_amp.local.processes import StopOnSignal


class RunListener:
    """Is told what happens to a run on this machine, in the process of its chief.

    By default nothing is done with it; a listener overrides the methods that it needs.
    """

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        """The run folder is there, and the trial is about to be made.

        Args:
            folder: Of the run.
            stop: With `requested` set, the run stops at its next report, with a checkpoint.
        """

    def on_training(self, first_batch: int, total_batches: int) -> None:
        """The loop starts; of `total_batches`, `first_batch` are trained already."""

    def on_status(self, status: str) -> None:
        """The trial says what it is doing."""

    def on_report(self, line: Mapping[str, Any]) -> None:
        """A line was added to `metrics.jsonl`: the metrics, their `group`, and `batches`."""

    def on_progress(self, share: float) -> None:
        """This share of the run is done, 0 to 1."""

    def on_checkpoints(self, checkpoints: Sequence[Path]) -> None:
        """These checkpoints are in the folder now, oldest first."""

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        """The run has ended.

        Args:
            error: What ended it; None if nothing went wrong.
            stopped: Whether it was asked to stop, to be resumed later.
        """


class LocalReports(core.DummyTrainContext):
    """Determined's reporting interface, into a run folder and to its listeners.

    Only the chief reports; give the other ranks a plain `core.DummyTrainContext`.

    Args:
        folder: Where `metrics.jsonl` and the event files go.
        experiment: Says which validation metric is the best, and in which direction.
        listeners: Are told of everything.
    """

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment[Any],
        listeners: Sequence[RunListener],
    ) -> None:
        super().__init__(tensorboard_path=folder.tensorboard)
        self._folder = folder
        self._listeners = listeners
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
        for listener in self._listeners:
            listener.on_status(status)

    def report_progress(self, progress: float) -> None:
        for listener in self._listeners:
            listener.on_progress(progress)

    def saved(self, checkpoints: Sequence[Path]) -> None:
        """These checkpoints are in the folder now."""
        for listener in self._listeners:
            listener.on_checkpoints(checkpoints)

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
        for listener in self._listeners:
            listener.on_report(line)
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
