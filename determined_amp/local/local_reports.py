"""Takes the reports of a local run, which Determined would send to a master."""

from __future__ import annotations

import math
from typing import Any

from determined_amp.amp.plain_data import Metrics, Values
from determined_amp.experiment.experiment import Experiment
from determined_amp.runs.folder import RunFolder, read_metrics
from determined_amp.trial.determined_private import LocalTrainContext


class LocalReports(LocalTrainContext):
    """Determined's train context for a local run, which knows the best validation.

    A subclass implements `report`, which gets each report.

    Only the chief reports; the other ranks get a plain `core.DummyTrainContext`.

    Args:
        folder: The run folder; Determined writes its event files there.
        experiment: The experiment. Its searcher's metric ranks the checkpoints.
        first_batch: Number of batches that earlier processes trained. Later reports in
            the folder are ignored, because their batches are trained again.
    """

    def __init__(
        self,
        folder: RunFolder,
        experiment: Experiment,
        first_batch: int,
    ) -> None:
        super().__init__(tensorboard_path=folder.tensorboard)
        self._searcher = experiment.platform.searcher
        self._best: tuple[float, int] | None = None  # value, batches
        for line in read_metrics(folder.metrics):
            if line["group"] == "validation" and line["batches"] <= first_batch:
                self._note_validation(line["batches"], line)

    def report(self, line: Values) -> None:
        """Take the line of a report: its metrics, their `group`, and `batches`."""
        raise NotImplementedError

    def is_best(self, batches: int) -> bool:
        """Whether the validation after `batches` batches is the best so far."""
        return self._best is not None and self._best[1] == batches

    def get_experiment_best_validation(self) -> float | None:
        return self._best[0] if self._best else None

    def take_report(self, group: str, batches: int, metrics: Metrics) -> None:
        numbers = {name: _number(value) for name, value in metrics.items()}
        self.report({**numbers, "group": group, "batches": batches})
        if group == "validation":
            self._note_validation(batches, numbers)

    def _note_validation(self, batches: int, metrics: Metrics) -> None:
        self.last_validation = batches
        value = metrics.get(str(self._searcher.metric))
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        if (
            self._best is None
            or (value < self._best[0]) is self._searcher.smaller_is_better
        ):
            self._best = (float(value), batches)


def _number(value: Any) -> Any:
    """A plain number for a numpy scalar; text for anything that is not a number."""
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (int, float)) else str(value)
