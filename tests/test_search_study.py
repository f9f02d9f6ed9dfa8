"""The study of a search, and its engine over workers that train nothing."""

from __future__ import annotations

import errno
import io
import math
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
from optuna.trial import TrialState
from rich.console import Console

from determined_amp.amp.errors import ConfigError
from determined_amp.runs.folder import RunError, RunFolder, trial_folder
from determined_amp.runs.run import Report, RunState
from determined_amp.search import optimize
from determined_amp.search.optimize import SearchError
from determined_amp.search.search_display import SearchDisplay, minutes
from determined_amp.search.search_folder import STUDY_FILE, read_search, write_config
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study import (
    StudyError,
    create_study,
    goes_on_after,
    open_trials,
    storing,
)
from determined_amp.search.trial_process import FirstBatch, TrialResult
from tests import searching, training
from tests.reporting import SEARCH, scored, write_study
from tests.searching import DEAD, Staged


def study_in(folder: Path) -> tuple[optuna.Study, int]:
    config = searching.load(folder, "loss_scale_grid.yaml", *searching.THREE_SCALES)
    return open_trials(folder, SearchPlan(config))


def new_study(folder: Path) -> optuna.Study:
    create_study(folder, searching.load(folder, "loss_scale_grid.yaml"))
    return study_in(folder)[0]


def test_folder_without_a_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"search\.yaml: there is no such file"):
        read_search(tmp_path)
    (tmp_path / "search.yaml").touch()
    with pytest.raises(RunError, match=r"study\.db: there is no such file"):
        read_search(tmp_path)
    (tmp_path / "study.db").touch()
    (tmp_path / "search.yaml").write_text("searcher: {metric: 5}")
    with pytest.raises(ConfigError, match=r"search\.yaml: searcher\.metric: got 5"):
        read_search(tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_trials_of_several_workers_share_the_device(tmp_path: Path, workers: int) -> None:
    write_study(tmp_path, [(1.0, scored(0))])
    written = write_config(tmp_path, SEARCH, workers)
    search = read_search(tmp_path)
    assert search.config == written
    assert written == {
        **SEARCH,
        "searcher": {**SEARCH["searcher"], "max_concurrent_trials": workers},
    }
    assert [run.shares_device for run in search.runs] == [workers > 1]
    single = {"searcher": {"name": "single"}}
    assert write_config(tmp_path, single, workers) == single


@pytest.mark.parametrize("stopped", [False, True])
def test_end_of_a_search_names_its_best_values(tmp_path: Path, *, stopped: bool) -> None:
    shown = io.StringIO()
    folder = write_study(tmp_path, [(2.0**scale, scored(scale)) for scale in (24, 16)])
    display = SearchDisplay(Console(file=shown, width=200), SearchPlan(SEARCH), folder)
    display.close(read_search(folder), stopped=stopped, failed=False)
    text = shown.getvalue()
    assert ("best so far, of trial 1:" in text, "\nbest:\n" in text) == (stopped, not stopped)
    assert (f"--resume {folder}\n" in text) is stopped
    assert "init_scale: 65536.0\n" in text
    assert [minutes(seconds) for seconds in (119.4, 120, 125.2)] == ["119 s", "2 min", "2 min 05 s"]


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_direction_is_that_of_the_searcher(tmp_path: Path, *, smaller_is_better: bool) -> None:
    study = create_study(tmp_path, {"searcher": {"smaller_is_better": smaller_is_better}})
    assert study.direction.name == ("MINIMIZE" if smaller_is_better else "MAXIMIZE")


def test_another_database_is_left_untouched(tmp_path: Path) -> None:
    file = tmp_path / STUDY_FILE
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE mine (x)")
    before = file.read_bytes()
    with pytest.raises(StudyError, match="no such table"):
        study_in(tmp_path)
    assert file.read_bytes() == before


def test_study_of_a_folder_with_an_odd_name_is_opened(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20?mode=rw#"
    folder.mkdir()
    assert new_study(folder).ask().number == 0
    assert {path.name for path in folder.iterdir()} == {STUDY_FILE, "search.yaml"}


def test_trials_that_ran_wait_again_and_come_first(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    started = [study.ask(), study.ask()]
    again, waiting = study_in(tmp_path)
    assert waiting == 3
    asked = [again.ask() for _ in range(3)]
    assert [trial.number for trial in asked] == [0, 1, 2]
    assert [trial.params for trial in asked[:2]] == [trial.params for trial in started]
    scales = [trial.params["amp.init_scale"] for trial in asked]
    assert scales == [2.0**24, 2.0**14, 2.0**4]


def test_threads_that_ask_at_once_are_given_different_trials(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    start = threading.Barrier(3)

    def ask() -> int:
        start.wait()
        return study.ask().number

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask) for _ in range(3)]
    assert sorted(each.result() for each in asked) == [0, 1, 2]


def test_database_on_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    refused = pytest.raises(StudyError, match=r"study\.db: cannot be read or written: .*--resume")
    with refused, storing(tmp_path), training.no_file_larger_than(1000):
        study.ask()
    assert study_in(tmp_path)[0].ask().number == 0


def test_full_disk_ends_a_search_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "disk full", str(tmp_path / "run.json"))
    monkeypatch.setattr(optimize, "open_trials", Mock(side_effect=full))
    with pytest.raises(StudyError, match=r"run\.json: cannot be .*: disk full; free .* --resume /"):
        optimize._optimize(tmp_path, Mock(search={"searcher": {}}), Mock(), 1)


def test_study_whose_writer_was_killed_in_a_transaction_is_opened(tmp_path: Path) -> None:
    """Such a file has a hot journal, which nobody who may only read can roll back."""
    new_study(tmp_path)
    write = (
        "import os, sqlite3; study = sqlite3.connect('study.db'); "
        "study.execute('PRAGMA cache_size = 2'); study.execute('CREATE TABLE big (x)'); "
        "study.executemany('INSERT INTO big VALUES (?)', [('x' * 4000,)] * 200); os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=False)
    assert killed.returncode == 9
    assert (tmp_path / f"{STUDY_FILE}-journal").stat().st_size > 0
    assert study_in(tmp_path)[0].ask().number == 0


def test_trial_worse_than_another_stops_where_they_are_first_compared(tmp_path: Path) -> None:
    config = searching.load(tmp_path, "loss_scale_asha.yaml", *searching.SHORT_ASHA)
    assert create_study(tmp_path, write_config(tmp_path, config, 1)).study_name == config["name"]
    study, _ = open_trials(tmp_path, SearchPlan(config))
    assert (study.ask().number, study.ask().number) == (0, 1)
    said = [
        *((0, 2, {"validation_loss": 1.0}), (1, 2, {"validation_loss": math.nan}), (1, 2, {})),
        *((1, batches, {"validation_loss": 2.0}) for batches in (2, 2, 8)),  # 2 again: a resume
    ]
    continues = [goes_on_after(tmp_path, i, Report(n, metrics)) for i, n, metrics in said]
    assert continues == [True, True, True, False, True, True]


def ended_by(state: RunState, reason: str | None = None) -> tuple[TrialResult]:
    return (TrialResult(state, reason=reason),)


COMPLETED = ended_by(RunState.COMPLETED)
AFTER = "; it ended after 2 batches"


class TestTrials:
    """Of a search with three points, whose processes only send messages."""

    @pytest.fixture(autouse=True)
    def _staged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(optimize, "TrialProcess", Staged)
        for name in ("made", "jobs"):
            monkeypatch.setattr(Staged, name, [])

    def run(
        self,
        folder: Path,
        *processes: Sequence[object],
        metric: str = "loss_scale_score",
        workers: int = 1,
        time_limit: float | None = None,
        on_end: Callable[[Any], object] = lambda run: None,
    ) -> Any:
        """The objective of a search whose processes send these messages, in their order."""
        config = searching.load(
            folder, "loss_scale_grid.yaml", *searching.THREE_SCALES, "max_restarts=1"
        )
        if not (folder / STUDY_FILE).exists():
            create_study(folder, write_config(folder, config, workers))
        for number in range(3):
            run_folder = RunFolder(trial_folder(folder, number))
            run_folder.append_metrics({"group": "validation", "batches": 2, metric: 0.5})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Staged, "scripts", list(processes))
            display: Any = Mock()
            display.ended.side_effect = on_end
            return optimize._optimize(folder, SearchPlan(config), display, workers, time_limit)

    def states(self, folder: Path) -> list[TrialState]:
        return [
            trial.state
            for trial in optuna.load_study(
                study_name=None, storage=f"sqlite:///{folder / STUDY_FILE}"
            ).trials
        ]

    @pytest.mark.parametrize(
        ("state", "metric", "ends", "kept"),
        [
            ("completed", "loss_scale_score", ("completed", ""), TrialState.COMPLETE),
            (
                "completed",
                "f1",
                ("failed", f"loss_scale_score was not reported{AFTER}"),
                TrialState.FAIL,
            ),
            ("pruned", "loss_scale_score", ("pruned", "2 batches: why"), TrialState.PRUNED),
            ("invalid", "loss_scale_score", ("invalid", f"why{AFTER}"), TrialState.FAIL),
        ],
    )
    def test_end_of_a_trial_is_recorded(
        self, tmp_path: Path, state: str, metric: str, ends: tuple[str, str], kept: TrialState
    ) -> None:
        ended = ended_by(RunState(state), None if state == "completed" else "why")
        self.run(tmp_path, ended, COMPLETED, COMPLETED, metric=metric)
        run = read_search(tmp_path).runs[0]
        assert (run.state.value, run.reason) == ends
        assert run.hparams == {"amp.init_scale": 2.0**24}
        assert self.states(tmp_path)[0] is kept

    def test_every_trial_has_a_process_and_those_of_one_time_have_slots(
        self, tmp_path: Path
    ) -> None:
        self.run(tmp_path, *[(FirstBatch(), *COMPLETED)] * 3, workers=2)
        assert len(Staged.made) == 3
        assert {trial.slot for trial in Staged.made} <= {0, 1}
        assert all(trial.connection.closed for trial in Staged.made)
        assert not any(trial.process.kill.called for trial in Staged.made)
        assert self.states(tmp_path) == [TrialState.COMPLETE] * 3

    def test_trial_whose_process_dies_continues_as_often_as_it_may(self, tmp_path: Path) -> None:
        self.run(tmp_path, (DEAD,), COMPLETED, (DEAD,), (DEAD,), COMPLETED)
        assert [job.number for job in Staged.jobs] == [0, 0, 1, 1, 2]
        _, failed, _ = read_search(tmp_path).runs
        died = "its process died 2 times, the last time with status -15"
        assert failed.reason == f"{died}{AFTER}"
        assert self.states(tmp_path) == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]

    def test_trial_whose_folder_has_its_end_is_not_run_again(self, tmp_path: Path) -> None:
        """The search was killed before its study had it."""
        RunFolder(trial_folder(tmp_path, 1)).end(RunState.COMPLETED)
        self.run(tmp_path, COMPLETED, COMPLETED)
        assert [job.number for job in Staged.jobs] == [0, 2]
        assert self.states(tmp_path) == [TrialState.COMPLETE] * 3

    def test_problem_of_the_machine_stops_the_search_and_leaves_its_trials_open(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(SearchError, match="disk full; the search stopped, and its open trials"):
            self.run(tmp_path, ended_by(RunState.STOPPED, "disk full"), (), workers=2)
        assert TrialState.FAIL not in self.states(tmp_path)
        self.run(tmp_path, *[COMPLETED] * 3)
        assert self.states(tmp_path) == [TrialState.COMPLETE] * 3

    @pytest.mark.parametrize("ending", ["terminate", "kill"])
    def test_time_limit_stops_what_runs_and_then_kills_it(
        self, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Staged, "ending", ending)
        monkeypatch.setattr(optimize, "GRACE", 0.2 if ending == "kill" else 60.0)
        made = self.run(tmp_path, (), time_limit=2.0)
        assert made.time_is_up
        (trial,) = Staged.made
        assert trial.process.kill.called is (ending == "kill")
        assert TrialState.FAIL not in self.states(tmp_path)

    def test_signal_starts_no_further_trial(self, tmp_path: Path) -> None:
        made = self.run(
            tmp_path, COMPLETED, COMPLETED, on_end=lambda run: signal.raise_signal(signal.SIGINT)
        )
        assert (made.stopping, made.time_is_up, len(Staged.made)) == (True, False, 1)
        assert self.states(tmp_path)[0] is TrialState.COMPLETE
