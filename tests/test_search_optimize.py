"""A search without a cluster, end to end: in processes that are killed and picked up."""

from __future__ import annotations

import errno
import math
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from determined_amp.cli import search as command
from determined_amp.runs.folder import RunError
from determined_amp.runs.run import Run, RunState
from determined_amp.search import optimize
from determined_amp.search.optimize import SearchError
from determined_amp.search.search_display import SearchDisplay
from determined_amp.search.search_folder import Search, read_search
from tests import searching, training
from tests.mortal import ORDER
from tests.reporting import write_study

MORTAL = "hyperparameters.trial=tests.mortal:MortalTrial"
TELLS_ITS_PROCESS = "hyperparameters.trial=tests.mortal:PidTrial"


pytestmark = pytest.mark.usefixtures("_workers_import_once", "_in_tmp_path")


def results(search: Search) -> list[object]:
    """What has to be the same whoever ran it, and how often it was interrupted."""
    return [
        (run.number, run.state, run.hparams, run.seed, run.metrics, run.curve("validation_loss"))
        for run in search.runs
    ]


def log2_scales(search: Search) -> list[float]:
    return [run.scale_log2 for run in search.runs]


def processes_in(directory: Path) -> int:
    """How many trained, or scored."""
    return len({*(directory / "pids").read_text().split()})


class TestGrid:
    def test_grid_scores_every_point_once_and_finds_the_best(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        scales = (*searching.THREE_SCALES, TELLS_ITS_PROCESS)
        study = searching.run(tmp_path, "loss_scale_grid.yaml", *scales, workers=2)
        assert processes_in(tmp_path) == 3
        assert log2_scales(study) == [24, 14, 4]
        assert {run.state for run in study.runs} == {RunState.COMPLETED}
        assert [run.scale_log2 for run in study.ranked()] == [14, 4, 24]
        highest, best, _ = study.runs
        assert highest.metrics["overflow"] == 1
        assert best.metrics["loss_scale_score"] == 0
        assert highest.metrics["steps_lost"] == 24 - 18
        assert highest.metrics["loss_scale_score"] == math.log2(1 + 24 - 18)
        assert best.hparams == {"amp.init_scale": 2.0**14}
        assert [batches for batches, _ in best.curve("loss_scale_score")] == [2]
        shown = capsys.readouterr().out
        assert (
            "no step is lost in 2 of 3 trials, at 2^4 to 2^14: a search can find nothing" in shown
        )
        assert "best:\nhyperparameters:\n  amp:\n    init_scale: 16384.0\n" in shown
        written = yaml.safe_load((Path(best.name) / "config.yaml").read_text())
        assert written["hyperparameters"]["amp"]["init_scale"] == 2.0**14

    def test_invalid_trial_has_its_reason_and_is_not_replaced(self, tmp_path: Path) -> None:
        path = searching.write(
            tmp_path,
            "loss_scale_grid.yaml",
            *searching.TWO_SCALES,
            "hyperparameters.trial=tests.mortal:OverflowingTrial",
        )
        with pytest.raises(SearchError, match="no trial of 2 has a result; trial 0: no loss scale"):
            command.main([path.name])
        runs = read_search(searching.only_folder(tmp_path)).runs
        assert [run.state for run in runs] == [RunState.INVALID] * 2
        assert all("no loss scale helps" in run.reason for run in runs)


def test_full_disk_before_the_first_trial_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    path = searching.write(tmp_path, "loss_scale_grid.yaml", *searching.TWO_SCALES)
    monkeypatch.setattr(optimize, "create_study", full)
    assert "cannot be written: [Errno 28] No space left" in refusal("search", path.name)
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search with early stopping that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return searching.run(folder, "loss_scale_asha.yaml", *searching.SHORT_ASHA, MORTAL)


class TestAsha:
    def test_killed_worker_changes_nothing(
        self, whole: Search, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ORDER.write_text("die once")
        study = searching.run(tmp_path, "loss_scale_asha.yaml", *searching.SHORT_ASHA, MORTAL)
        assert "its process died with status -9" in capsys.readouterr().out
        assert not ORDER.exists()
        assert results(study) == results(whole)
        killed = study.runs[0]
        assert killed.state is RunState.COMPLETED
        assert [batches for batches, _ in killed.curve("validation_loss")] == [2, 4, 6, 8]
        same = [
            training.checkpoint(Path(s.runs[0].name), 8)["models_state_dict"]
            for s in (study, whole)
        ]
        assert training.digest(same[0]) == training.digest(same[1])

    def test_trials_train_report_and_stop(self, whole: Search) -> None:
        states = [run.state for run in whole.runs]
        assert len(states) == 4
        assert set(states) == {RunState.COMPLETED, RunState.PRUNED}
        assert len({run.seed for run in whole.runs}) == 4
        for run in whole.runs:
            assert "validation_loss" in run.metrics
            assert run.last("skipped_steps") is not None
            assert run.batches == (8 if run.state is RunState.COMPLETED else 2)


class TestComparison:
    """`compare_precisions.yaml`: every precision with every seed, held against each other."""

    TWO_OF_EACH = (
        "hyperparameters.amp.precision.vals=[fp32, amp_fp16]",
        "hyperparameters.trial_seed.vals=[1, 2]",
        *searching.SHORT,
    )

    def test_trials_are_runs_of_their_own_seed_and_process(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        overrides = (*self.TWO_OF_EACH, TELLS_ITS_PROCESS)
        study = searching.run(tmp_path, "compare_precisions.yaml", *overrides)
        assert processes_in(tmp_path) == 4
        assert {run.state for run in study.runs} == {RunState.COMPLETED}
        folders = {(run.precision.value, run.seed): Path(run.name) for run in study.runs}
        assert folders.keys() == {(p, s) for p in ("fp32", "amp_fp16") for s in (1, 2)}
        # What a process of its own, which searches nothing, makes of it.
        alone = training.run_small(
            "mlp/amp.yaml",
            tmp_path / "alone",
            *searching.SHORT,
            "reproducibility.experiment_seed=2",
        )
        searched = training.checkpoint(folders["amp_fp16", 2], 8)["models_state_dict"]
        expected = training.checkpoint(alone, 8)["models_state_dict"]
        assert training.digest(searched) == training.digest(expected)
        shown = capsys.readouterr().out
        folder = searching.only_folder(tmp_path).relative_to(tmp_path)
        assert f"python -m determined_amp report precision {folder}\n" in shown
        assert "best" not in shown
        assert "speeds cannot" not in shown

    def test_warns_that_trials_side_by_side_are_no_measure_of_speed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
    ) -> None:
        one_of_each = (*self.TWO_OF_EACH, "hyperparameters.trial_seed.vals=[1]")
        searching.run(tmp_path, "compare_precisions.yaml", *one_of_each, workers=2)
        assert "their speeds cannot" in capsys.readouterr().out
        folder = searching.only_folder(tmp_path)
        (run, *_) = read_search(folder).runs
        assert run.shares_device
        assert run.speed is None
        assert "began with 2" in refusal("search", "--resume", str(folder))

    def test_a_precision_that_always_fails_is_a_result(self, tmp_path: Path) -> None:
        path = searching.write(
            tmp_path,
            "compare_precisions.yaml",
            *self.TWO_OF_EACH,
            "hyperparameters.trial_seed.vals=[1, 2, 3]",
            "hyperparameters.trial=tests.mortal:OverflowingTrial",
            "hyperparameters.amp.max_consecutive_skips=3",
        )
        assert command.main([path.name]) == 0
        study = read_search(searching.only_folder(tmp_path))
        by_turns = ["amp_fp16", "fp32", "fp32", "amp_fp16", "amp_fp16", "fp32"]
        assert [run.hparams["amp.precision"] for run in study.runs] == by_turns
        for run in study.runs:
            in_float16 = run.hparams["amp.precision"] == "amp_fp16"
            assert run.state is (RunState.INVALID if in_float16 else RunState.COMPLETED)
            assert ("overflow" in run.reason) is in_float16


def test_worker_that_dies_too_often_costs_its_trial_only(tmp_path: Path) -> None:
    ORDER.write_text("die once")
    study = searching.run(
        tmp_path,
        "loss_scale_asha.yaml",
        *searching.SHORT_ASHA,
        MORTAL,
        "max_restarts=0",
        "searcher.max_trials=2",
        status=1,
    )
    killed, other = study.runs
    assert (killed.state, other.state) == (RunState.FAILED, RunState.COMPLETED)
    assert "its process died 1 times, the last time with status -9" in killed.reason


def folder_with_a_result(directory: Path) -> Path:
    """Wait for one."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        time.sleep(0.05)
        for folder in directory.glob("runs/*/*"):
            with suppress(RunError):
                if read_search(folder).ranked():
                    return folder
    raise AssertionError("no trial ended within five minutes")


def test_killed_search_continues_where_it_was(tmp_path: Path) -> None:
    """A process of its own, so that it can be killed with all it has in memory."""
    many = ("hyperparameters.amp.init_scale.count=6", searching.TWO_SCALES[1])
    path = searching.write(tmp_path, "loss_scale_grid.yaml", *many)
    words = ("-m", "determined_amp", "search", path.name, "--workers", "2")
    search = training.start(*words, cwd=tmp_path)
    folder = folder_with_a_result(tmp_path)
    search.kill()
    search.communicate(timeout=300)
    before = read_search(folder)
    assert len(before.ranked()) < 6
    assert_goes_on(folder, before, 6)


def test_signal_stops_the_search_until_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = SearchDisplay.ended

    def end_then_interrupt(display: SearchDisplay, run: Run) -> None:
        ended(display, run)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as planted:
        planted.setattr(SearchDisplay, "ended", end_then_interrupt)
        before = searching.run(tmp_path, "loss_scale_grid.yaml", *searching.TWO_SCALES, status=130)
    shown = capsys.readouterr().out
    folder = searching.only_folder(tmp_path)
    assert f"--resume {folder.relative_to(tmp_path)}" in shown
    assert log2_scales(before) == [24]
    assert_goes_on(folder, before, 2)


def assert_goes_on(folder: Path, before: Search, points: int) -> None:
    """Resume: all points are there once, and what had ended is as it was."""
    assert command.main(["--resume", str(folder)]) == 0
    after = read_search(folder)
    assert len(set(log2_scales(after))) == len(after.runs) == points
    assert {run.state for run in after.runs} == {RunState.COMPLETED}
    for run in before.ranked():
        again = after.runs[run.number]
        assert (again.hparams, again.metrics, again.date) == (run.hparams, run.metrics, run.date)


def test_second_process_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    folder = write_study(tmp_path / "study", [])
    with training.locked_by_another_process(folder):
        assert "is running this search" in refusal("search", "--resume", str(folder))


def test_full_disk_stops_the_search_and_a_resume_takes_up_its_trials(
    tmp_path: Path, refusal: Callable[..., str]
) -> None:
    path = searching.write(
        tmp_path,
        "loss_scale_asha.yaml",
        *searching.SHORT_ASHA,
        "hyperparameters.trial=tests.mortal:FullDiskTrial",
        "searcher.max_trials=2",
    )
    message = refusal("search", path.name)
    assert "No space left on device: " in message
    assert "; the search stopped, and its open trials continue" in message
    folder = searching.only_folder(tmp_path)
    assert f"--resume {folder.relative_to(tmp_path)}" in message
    assert not read_search(folder).ranked()
    (tmp_path / "free").touch()
    assert command.main(["--resume", str(folder)]) == 0
    assert len(read_search(folder).ranked()) == 2


def test_trial_that_changes_the_directory_leaves_the_next_one_where_it_was(tmp_path: Path) -> None:
    leaving = "hyperparameters.trial=tests.mortal:LeavingTrial"
    search = searching.run(tmp_path, "loss_scale_grid.yaml", *searching.TWO_SCALES, leaving)
    assert {run.state for run in search.runs} == {RunState.COMPLETED}
    assert not list((tmp_path / "away").iterdir())
