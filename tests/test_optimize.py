"""A search without a cluster, end to end: in processes that are killed and picked
up.
"""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from determined_amp import __main__ as door
from determined_amp.amp.errors import UserError
from determined_amp.experiment.overrides import with_overrides
from determined_amp.runs.run import RunState, curve_of
from determined_amp.search import optimize
from determined_amp.search.search_display import line_of_a_trial
from determined_amp.search.search_folder import read_search
from tests import run_here, searching
from tests.reporting import write_study

LEAVING = "hyperparameters.trial=tests.mortal:LeavingTrial"
OVERFLOWING = "hyperparameters.trial=tests.mortal:OverflowingTrial"

pytestmark = [
    pytest.mark.usefixtures("_workers_are_forks", "_in_tmp_path"),
    searching.FORKS,
]


def log2_scales(search):
    return [run.scale_log2 for run in search.runs]


def processes_in(directory):
    """How many trained, or scored, each from the same directory."""
    return len({*(directory / "pids").read_text().split()})


def test_grid_that_a_signal_stopped_goes_on_and_finds_the_best(
    tmp_path, monkeypatch, capsys
):
    def end_then_interrupt(search, run):
        signal.raise_signal(signal.SIGINT)
        return line_of_a_trial(search, run)

    scales = (*searching.THREE_SCALES, LEAVING)
    with monkeypatch.context() as planted:
        planted.setattr(optimize, "line_of_a_trial", end_then_interrupt)
        before = searching.run(tmp_path, "loss_scale_grid.yaml", *scales, status=130)
    folder = searching.only_folder(tmp_path)
    assert f"--resume {folder.relative_to(tmp_path)}" in capsys.readouterr().out
    assert log2_scales(before) == [24]
    assert_goes_on(folder, before, 3)
    study = read_search(folder)
    assert processes_in(tmp_path) == 3
    assert [run.scale_log2 for run in study.ranked()] == [14, 4, 24]
    highest, best, _ = study.runs
    assert highest.metrics["steps_lost"] == 24 - 18
    assert curve_of(best.validations, "loss_scale_score") == [(2, 0.0)]
    assert (
        "at 2^4 to 2^14: use 2^9; no lower scale was tried\n" in capsys.readouterr().out
    )


def test_invalid_trial_has_its_reason_and_is_not_replaced(tmp_path):
    path = searching.write(
        tmp_path, "loss_scale_grid.yaml", *searching.TWO_SCALES, OVERFLOWING
    )
    with pytest.raises(
        UserError, match="no trial of 2 has a result; trial 0: every loss scale down"
    ):
        door.run(["search", path, "--workers", "2"])
    runs = read_search(searching.only_folder(tmp_path)).runs
    assert [run.state for run in runs] == [RunState.INVALID] * 2


def test_full_disk_stops_the_search_and_a_resume_goes_on(tmp_path, refusal):
    full = "hyperparameters.trial=tests.mortal:FullDiskTrial"
    path = searching.write(
        tmp_path, "loss_scale_asha.yaml", *searching.SHORT_ASHA, full
    )
    message = refusal("search", path)
    assert "No space left on device: " in message
    assert "; the search stopped, and its open trials continue" in message
    folder = searching.only_folder(tmp_path)
    assert f"--resume {folder.relative_to(tmp_path)}" in message
    assert not read_search(folder).ranked()
    (tmp_path / "free").touch()
    assert door.run(["search", "--resume", str(folder)]) == 0
    runs = read_search(folder).runs
    assert len(runs) == 4
    assert {run.state for run in runs} == {RunState.COMPLETED, RunState.PRUNED}
    for run in runs:
        assert run.validated.batches == (8 if run.state is RunState.COMPLETED else 2)
    resumed = runs[0]
    assert [part.first_batch for part in resumed.parts] == [0, 4]
    assert [
        batches for batches, _ in curve_of(resumed.validations, "validation_loss")
    ] == [2, 4, 6, 8]
    # The same trial, undisturbed and without a search.
    alone, config = tmp_path / "alone", Path(resumed.name) / "config.yaml"
    assert door.run(["train", str(config), "--run-folder", str(alone)]) == 0
    weights = [
        run_here.digest(run_here.checkpoint(run, 8)["models_state_dict"])
        for run in (Path(resumed.name), alone)
    ]
    assert weights[0] == weights[1]


ONE_OF_EACH = (
    "hyperparameters.amp.precision.vals=[fp32, amp_fp16]",
    "hyperparameters.trial_seed.vals=[2]",
    *searching.SHORT,
)


def test_trials_of_a_comparison_are_runs_of_their_own_seed_and_process(
    tmp_path, capsys
):
    study = searching.run(tmp_path, "compare_precisions.yaml", *ONE_OF_EACH, LEAVING)
    assert processes_in(tmp_path) == 2
    assert {run.state for run in study.runs} == {RunState.COMPLETED}
    assert {run.seed for run in study.runs} == {2}
    shown = capsys.readouterr().out
    folder = searching.only_folder(tmp_path).relative_to(tmp_path)
    assert f"compare: det-amp report {folder}\n" in shown
    assert "best" not in shown
    assert "speeds cannot" not in shown


def test_comparison_side_by_side_has_no_speeds(tmp_path):
    few = "hyperparameters.amp.max_consecutive_skips=3"
    overrides = (*ONE_OF_EACH, OVERFLOWING, few)
    study = searching.run(tmp_path, "compare_precisions.yaml", *overrides, workers=2)
    for run in study.runs:
        assert run.shares_device
        assert run.speed is None
        in_float16 = run.hparams["amp.precision"] == "amp_fp16"
        assert run.state is (RunState.INVALID if in_float16 else RunState.COMPLETED)
        assert ("overflow" in run.reason) is in_float16


def test_killed_search_continues_where_it_was(tmp_path, monkeypatch):
    """Killed when its first trial has ended, in a process of its own: all in its memory
    is lost.
    """

    def kill(search, run):
        os.kill(os.getpid(), signal.SIGKILL)

    many = ("hyperparameters.amp.init_scale.count=4", searching.TWO_SCALES[1])
    path = searching.write(tmp_path, "loss_scale_grid.yaml", *many)
    with monkeypatch.context() as planted:
        planted.setattr(optimize, "line_of_a_trial", kill)
        work = partial(door.run, ["search", path, "--workers", "2"])
        search = run_here.fork(work, tmp_path / "printed")
        assert run_here.wait(search) == -signal.SIGKILL
    folder = searching.only_folder(tmp_path)
    before = read_search(folder)
    assert before.ranked()
    assert len(before.ranked()) < 4
    assert_goes_on(folder, before, 4)


def assert_goes_on(folder, before, points):
    """Resume: all points are there once, and what had ended is as it was."""
    assert door.run(["search", "--resume", str(folder)]) == 0
    after = read_search(folder)
    assert len(set(log2_scales(after))) == len(after.runs) == points
    assert {run.state for run in after.runs} == {RunState.COMPLETED}
    for run in before.ranked():
        again = after.runs[run.number]
        assert (again.hparams, again.metrics, again.date) == (
            run.hparams,
            run.metrics,
            run.date,
        )


def test_trial_of_a_search_loads_by_forks_and_its_data_needs_no_pickling(tmp_path):
    seeds = "hyperparameters.trial_seed={type: categorical, vals: [1, 2]}"
    loads = "entrypoint=tests.strangers:WithLoaderProcesses"
    config = with_overrides(run_here.STRANGE, ["searcher.name=grid", seeds, loads])
    assert door.run(["search", run_here.write_yaml(tmp_path, config)]) == 0
    one, two = read_search(searching.only_folder(tmp_path)).runs
    assert one.state is two.state is RunState.COMPLETED
    assert one.metrics["val_loss"] != two.metrics["val_loss"]


def test_second_process_on_a_search_is_refused(tmp_path, refusal):
    folder = write_study(tmp_path / "study", [])
    with run_here.locked_by_another_process(folder):
        assert "is running this search" in refusal("search", "--resume", str(folder))
