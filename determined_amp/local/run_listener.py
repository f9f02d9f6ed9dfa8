"""The events of a local run, and the reports among them, which Determined gives to a master."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from determined_amp.experiment.experiment import Experiment
from determined_amp.local.processes import StopOnSignal
from determined_amp.runs.folder import RunFolder, read_metrics
from determined_amp.trial.determined_private import LocalTrainContext


class RunListener:
    """Receives the events of a local run, in the process of its chief.

    All methods do nothing by default; a listener overrides those that it needs.
    """

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        """The run folder exists, and the trial is about to be made.

        Args:
            folder: The run folder.
            stop: Set its `requested` to stop the run at its next report, with a checkpoint.
        """

    def on_precision(self, precision: str) -> None:
        """The trial has been made, and trains in this precision, in words."""

    def on_training(self, first_batch: int, total_batches: int, epoch_batches: int) -> None:
        """The loop starts; `first_batch` of `total_batches` batches are trained already.

        An epoch has `epoch_batches` batches on one slot.
        """

    def on_report(self, line: Mapping[str, Any]) -> None:
        """The loop has reported: a line has the metrics, their `group`, and `batches`."""

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        """The run has ended.

        Args:
            error: The exception that ended it; None if it ended normally.
            stopped: Whether it was stopped, and can be resumed.
        """


class LocalReports(LocalTrainContext):
    """Determined's train context, which notifies the listeners and knows the best validation.

    Only the chief reports; the other ranks get a plain `core.DummyTrainContext`.

    Args:
        folder: The run folder; Determined writes its event files there.
        experiment: Has the metric that ranks checkpoints, and whether smaller is better.
        listeners: Receive every event.
        first_batch: Number of batches that earlier processes trained. Later reports in the folder
            are ignored, because their batches are trained again.
    """

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        listeners: Sequence[RunListener],
        first_batch: int,
    ) -> None:
        super().__init__(tensorboard_path=folder.tensorboard)
        self._listeners = listeners
        self._metric = experiment.platform.searcher.metric
        self._smaller_is_better = experiment.platform.searcher.smaller_is_better
        self._best: tuple[float, int] | None = None  # value, batches
        for line in read_metrics(folder.metrics):
            if line["group"] == "validation" and line["batches"] <= first_batch:
                self._note_validation(line["batches"], line)

    def is_best(self, batches: int) -> bool:
        """Whether the validation after `batches` batches is the best so far."""
        return self._best is not None and self._best[1] == batches

    def get_experiment_best_validation(self) -> float | None:
        return self._best[0] if self._best else None

    def take_report(self, group: str, batches: int, metrics: dict[str, Any]) -> None:
        numbers = {name: _number(value) for name, value in metrics.items()}
        line = {"group": "", **numbers} | {"group": group, "batches": batches}
        for listener in self._listeners:
            listener.on_report(line)
        if group == "validation":
            self._note_validation(batches, numbers)

    def _note_validation(self, batches: int, metrics: dict[str, Any]) -> None:
        self.last_validation = batches
        value = metrics.get(self._metric) if self._metric is not None else None
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        if self._best is None or (value < self._best[0]) is self._smaller_is_better:
            self._best = (float(value), batches)


def _number(value: Any) -> Any:
    """A plain number for a numpy scalar; text for anything that is not a number."""
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (int, float)) else str(value)
