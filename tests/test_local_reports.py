"""What a search is told of a local run, and that it can stop it."""

from __future__ import annotations

import math
import multiprocessing
from unittest.mock import Mock

import numpy as np
import pytest

from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.checkpoint_storage import Resume
from determined_amp.local.local_reports import LocalReports
from determined_amp.local.trainer import train
from determined_amp.runs.folder import RunFolder, complete_checkpoints
from determined_amp.search.trial_process import _asking
from tests import training

PATH = str(training.ROOT / "experiment_configs/mlp/bf16.yaml")
EXPERIMENT = parse(with_overrides(read_yaml(PATH), training.SMALL), PATH)


@pytest.mark.parametrize(("stops_at", "end"), [(0, "completed"), (6, "pruned")])
def test_search_is_asked_after_every_report_and_can_stop_the_run(
    stops_at, end, tmp_path, capsys
):
    """A run that the search stops keeps a checkpoint."""
    asked = []

    def goes_on(line):
        asked.append((line["group"], line["batches"]))
        return asked[-1] != ("validation", stops_at)

    train(EXPERIMENT, lambda: RunFolder(tmp_path), Resume(), goes_on)
    lines = [(line["group"], line["batches"]) for line in training.metrics(tmp_path)]
    assert asked == [("start", 0), *lines]
    assert training.end(tmp_path)[0] == end
    newest = complete_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.name == f"batch-{stops_at or 12:08d}"
    assert capsys.readouterr().out == ""


def test_best_validation_has_the_best_finite_value_of_the_metric(tmp_path, monkeypatch):
    told = Mock()
    reports = LocalReports(RunFolder(tmp_path), EXPERIMENT, 0)
    monkeypatch.setattr(reports, "report", told)
    for batches, value in enumerate([np.float64(0.5), math.nan, "text", 0.25, 0.75], 1):
        metrics = {"validation_loss": value, "other": -batches, "batches": 99}
        reports._report_trial_metrics("validation", batches, metrics)
    assert [batches for batches in range(6) if reports.is_best(batches)] == [4]
    assert reports.get_experiment_best_validation() == 0.25
    line = {"validation_loss": 0.5, "other": -1, "group": "validation", "batches": 1}
    assert told.call_args_list[0].args == (line,)
    assert type(told.call_args_list[0].args[0]["validation_loss"]) is float


def test_trial_whose_search_was_killed_stops_with_a_checkpoint(tmp_path):
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    train(EXPERIMENT, lambda: RunFolder(tmp_path), Resume(), _asking(theirs))
    state, reason, batches = training.end(tmp_path)
    assert (state, reason) == ("stopped", "stopped by SIGTERM")
    assert 0 < batches < 12
    assert complete_checkpoints(tmp_path / "checkpoints")
