"""What a search is told of a local run, and that it can stop it."""

import math
import multiprocessing
from unittest.mock import Mock

import numpy as np
import pytest

from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.experiment.sections import Searcher
from determined_amp.local.checkpoint_storage import BestValidation, Resume
from determined_amp.local.logs import Terminal
from determined_amp.local.trainer import LocalRun, train
from determined_amp.runs.folder import RunFolder, complete_checkpoints
from determined_amp.search.trial_process import _asking
from tests import run_here

PATH = str(run_here.ROOT / "experiment_configs/mlp/bf16.yaml")
EXPERIMENT = parse(with_overrides(read_yaml(PATH), run_here.SMALL), PATH)


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
    lines = [(line["group"], line["batches"]) for line in run_here.metrics(tmp_path)]
    assert asked == [("start", 0), *lines]
    assert run_here.end(tmp_path)[0] == end
    newest = complete_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.name == f"batch-{stops_at or 12:08d}"
    assert capsys.readouterr().out == ""


def test_best_validation_has_the_best_finite_value_of_the_metric(tmp_path):
    stop, console = Mock(), Terminal(quiet=True)
    stop.processes.size = 1
    run = LocalRun(EXPERIMENT, Resume(), RunFolder(tmp_path), stop, console)
    run.begin_training(0, 12, 6)
    for batches, value in enumerate([np.float64(0.5), math.nan, "text", 0.25, 0.75], 1):
        metrics = {"validation_loss": value, "other": -batches, "batches": 99}
        run._report_trial_metrics("validation", batches, metrics)
    assert [batches for batches in range(6) if run.best.is_after(batches)] == [4]
    assert run.get_experiment_best_validation() == 0.25
    line = {"validation_loss": 0.5, "other": -1, "group": "validation", "batches": 1}
    assert run_here.metrics(tmp_path)[0] == line


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_first_of_equal_validations_is_the_best(*, smaller_is_better):
    """As on a master."""
    searcher = Searcher(metric="f1", smaller_is_better=smaller_is_better)
    best = BestValidation(searcher)
    for batches in (1, 2, 3):
        best.note(batches, {"f1": 0.5})
    assert best.is_after(1)


def test_trial_whose_search_was_killed_stops_with_a_checkpoint(tmp_path):
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    train(EXPERIMENT, lambda: RunFolder(tmp_path), Resume(), _asking(theirs))
    state, reason, batches = run_here.end(tmp_path)
    assert (state, reason) == ("stopped", "stopped by SIGTERM")
    assert 0 < batches < 12
    assert complete_checkpoints(tmp_path / "checkpoints")
