"""What a listener of a local run is told, and that it can stop the run."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.checkpoint_storage import complete_checkpoints
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.run_listener import LocalReports, RunListener
from determined_amp.local.trainer import train
from determined_amp.runs.folder import RunFolder
from determined_amp.search.trial_process import TrialListener
from tests import training


class Recorder(RunListener):
    """Keeps what it is told; stops the run at the validation after so many batches."""

    def __init__(self, stops_at: int = 0) -> None:
        self._stops_at = stops_at
        self.events: list[tuple[Any, ...]] = []

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        self._stop = stop
        self.events.append(("start", folder.path))

    def on_training(self, first_batch: int, total_batches: int, epoch_batches: int) -> None:
        self.events.append(("training", first_batch, total_batches))

    def on_report(self, line: Mapping[str, Any]) -> None:
        self.events.append(("report", line["group"], line["batches"]))
        if line["group"] == "validation" and line["batches"] == self._stops_at:
            self._stop.requested = True

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        self.events.append(("end", error, stopped))


PATH = str(training.ROOT / "experiment_configs/mlp/bf16.yaml")
EXPERIMENT = parse(with_overrides(read_yaml(PATH), training.SMALL), PATH)


def run(folder: Path, *listeners: RunListener) -> None:
    train(EXPERIMENT, lambda: RunFolder(folder), None, listeners=listeners, show=False)


@pytest.mark.parametrize("stops_at", [0, 6])
def test_listener_gets_every_event_in_order_and_can_stop_the_run(
    stops_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which keeps a checkpoint."""
    recorder = Recorder(stops_at)
    run(tmp_path, recorder)
    assert recorder.events[:2] == [("start", tmp_path), ("training", 0, 12)]
    assert recorder.events[-1] == ("end", None, stops_at > 0)
    lines = [("report", line["group"], line["batches"]) for line in training.metrics(tmp_path)]
    assert recorder.events[2:-1] == lines
    assert lines[-1][2] == (stops_at or 12)
    newest = complete_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.name == f"batch-{stops_at or 12:08d}"
    assert capsys.readouterr().out == ""


def test_best_validation_has_the_best_finite_value_of_the_metric(tmp_path: Path) -> None:
    listener = Mock()
    reports = LocalReports(RunFolder(tmp_path), EXPERIMENT, [listener], 0)
    for batches, value in enumerate([np.float64(0.5), math.nan, "text", 0.25, 0.75], 1):
        metrics = {"validation_loss": value, "other": -batches, "batches": 99}
        reports._report_trial_metrics("validation", batches, metrics)
    assert [batches for batches in range(6) if reports.is_best(batches)] == [4]
    assert reports.get_experiment_best_validation() == 0.25
    line = {"validation_loss": 0.5, "other": -1, "group": "validation", "batches": 1}
    assert listener.on_report.call_args_list[0].args == (line,)
    assert type(listener.on_report.call_args_list[0].args[0]["validation_loss"]) is float


def test_trial_whose_search_was_killed_stops_with_a_checkpoint(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    run(tmp_path, TrialListener(theirs))
    state, reason, batches = training.end(tmp_path)
    assert (state, reason) == ("stopped", "its search was killed")
    assert 0 < batches < 12
    assert complete_checkpoints(tmp_path / "checkpoints")
