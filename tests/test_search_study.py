"""The study of a search, and its engine over workers that train nothing."""

from __future__ import annotations

import errno
import io
import math
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from optuna.trial import TrialState
from rich.console import Console

from determined_amp.amp.errors import ConfigError
from determined_amp.runs.folder import RunError, RunFolder, read_record
from determined_amp.runs.run import Report, Run, RunState
from determined_amp.search import engine
from determined_amp.search.search_display import SearchDisplay, minutes
from determined_amp.search.search_folder import STUDY_FILE, read_search, write_config
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study import SearchStudy, StudyError, create_study, storing
from determined_amp.search.workers import FirstBatch, TrialResult
from tests import searching, training
from tests.reporting import SEARCH, scored, write_study
from tests.searching import DEAD, Staged


def study_in(folder: Path) -> SearchStudy:
    config = searching.load(folder, "loss_scale_grid.yaml", *searching.THREE_SCALES)
    return SearchStudy(SearchPlan(config), folder)


def new_study(folder: Path) -> SearchStudy:
    create_study(folder, searching.load(folder, "loss_scale_grid.yaml"))
    return study_in(folder)


def next_number(study: SearchStudy) -> int:
    job = study.next_job()
    assert job is not None
    return job[0]


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
    assert new_study(folder).next_job() is not None
    assert {path.name for path in folder.iterdir()} == {STUDY_FILE, "search.yaml", "trials"}


def test_trials_that_run_come_before_those_that_wait(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    jobs = [study.next_job(), study.next_job()]
    again = study_in(tmp_path)
    assert [again.next_job(), again.next_job()] == jobs
    assert (next_number(again), again.next_job()) == (2, None)


def test_trial_whose_folder_has_its_end_is_not_run_again(tmp_path: Path) -> None:
    """The search was killed before the study had it."""
    first = new_study(tmp_path).next_job()
    assert first is not None
    folder = RunFolder(first[1].folder)
    folder.append_metrics({"group": "validation", "batches": 2, "loss_scale_score": 0.5})
    folder.end(RunState.COMPLETED)
    assert (first[0], next_number(study_in(tmp_path))) == (0, 1)


def test_database_on_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    refused = pytest.raises(StudyError, match=r"study\.db: cannot be read or written: .*--resume")
    with refused, storing(tmp_path), training.no_file_larger_than(1000):
        study.next_job()
    assert next_number(study_in(tmp_path)) == 0


def test_full_disk_ends_a_search_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "disk full", str(tmp_path / "run.json"))
    monkeypatch.setattr(engine, "SearchStudy", Mock(side_effect=full))
    with pytest.raises(StudyError, match=r"run\.json: cannot be .*: disk full; free .* --resume /"):
        engine._run(tmp_path, Mock(search={"searcher": {}}), Mock(), 1)


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
    assert study_in(tmp_path).next_job() is not None


def test_trial_worse_than_another_stops_where_they_are_first_compared(tmp_path: Path) -> None:
    config = searching.load(tmp_path, "loss_scale_asha.yaml", *searching.SHORT_ASHA)
    assert create_study(tmp_path, config).study_name == "loss-scale-asha"
    study = SearchStudy(SearchPlan(config), tmp_path)
    numbers = next_number(study), next_number(study)
    said = [
        *((0, 2, {"validation_loss": 1.0}), (1, 2, {"validation_loss": math.nan}), (1, 2, {})),
        *((1, batches, {"validation_loss": 2.0}) for batches in (2, 2, 8)),  # 2 again: a resume
    ]
    goes_on = [study.validated(numbers[i], Report(n, metrics)) for i, n, metrics in said]
    assert goes_on == [True, True, True, False, True, True]


AFTER, FAIL = "; it ended after 2 batches", TrialState.FAIL


@pytest.mark.parametrize(
    ("state", "metric", "ends", "kept"),
    [
        ("completed", "loss_scale_score", ("completed", ""), TrialState.COMPLETE),
        ("completed", "f1", ("failed", f"loss_scale_score was not reported{AFTER}"), FAIL),
        ("pruned", "loss_scale_score", ("pruned", "2 batches: why"), TrialState.PRUNED),
        ("invalid", "loss_scale_score", ("invalid", f"why{AFTER}"), FAIL),
    ],
)
def test_end_of_a_trial_is_recorded(
    tmp_path: Path, state: str, metric: str, ends: tuple[str, str], kept: TrialState
) -> None:
    study = new_study(tmp_path)
    job = study.next_job()
    assert job is not None
    assert read_record(job[1].folder).hparams == {"amp.init_scale": 2.0**24}
    RunFolder(job[1].folder).append_metrics({"group": "validation", "batches": 2, metric: 0.5})
    run = study.ended(0, TrialResult(RunState(state), reason="why"))
    assert run is not None
    assert (run.state, run.reason) == ends
    assert [trial.state for trial in study._trials()][:2] == [kept, TrialState.WAITING]
    assert study._trials()[0].value == (0.5 if kept is TrialState.COMPLETE else None)


def test_trial_that_was_interrupted_or_whose_process_died_comes_first(tmp_path: Path) -> None:
    config = searching.load(tmp_path, "loss_scale_grid.yaml", "max_restarts=1")
    create_study(tmp_path, config)
    study = SearchStudy(SearchPlan(config), tmp_path)
    assert next_number(study) == 0
    assert study.ended(0, TrialResult(RunState.STOPPED)) is None
    assert next_number(study) == 0
    assert study.lost(0, -9) is None
    assert next_number(study) == 0
    failed = study.lost(0, -9)
    assert failed is not None
    died = "its process died 2 times, the last time with status -9"
    assert failed.reason == f"{died}; it ended after 0 batches"
    assert next_number(study) == 1


def ended_by(state: RunState, reason: str | None = None) -> tuple[TrialResult]:
    return (TrialResult(state, reason=reason),)


COMPLETED = ended_by(RunState.COMPLETED)


class TestEngine:
    @pytest.fixture(autouse=True)
    def _staged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "Worker", Staged)
        monkeypatch.setattr(engine, "GRACE", 0.0)
        monkeypatch.setattr(Staged, "made", [])

    def run(
        self,
        *trials: Sequence[object],
        workers: int = 1,
        compares: bool = False,
        time_limit: float = math.inf,
        on_end: Callable[[engine.Engine], object] = lambda engine: None,
    ) -> Any:
        """The engine that ran trials which send these messages."""

        def ended(number: int, result: TrialResult) -> Run | None:
            on_end(made)
            if result.state is RunState.STOPPED:
                return None
            return Run(str(number), result.state, result.reason or "")

        study: Any = Mock(compares=compares)
        study.next_job.side_effect = [*enumerate(trials), *[None] * 9]
        study.validated.side_effect = lambda number, report: report.batches < 4
        study.lost.return_value = None
        study.ended.side_effect = ended
        made = engine.Engine(study, Mock(), workers, time_limit)
        made.run()
        return made

    @pytest.mark.parametrize(
        ("reasons", "common"),
        [
            (["a 1 b", "a 2.5e-3 b", "a 3 b", "a"], "a 3 b"),
            (["a 1 b", "a 2 b", "c", "a 4 b"], None),
            (["a", "a", None, "a"], None),
        ],
    )
    def test_three_failures_alike_in_a_row_end_a_search(
        self, reasons: Sequence[str | None], common: str | None
    ) -> None:
        ends = [COMPLETED if r is None else ended_by(RunState.FAILED, r) for r in reasons]
        made = self.run(*ends)
        assert made.common_failure == common
        assert made._study.ended.call_count == (4 if common is None else 3)

    @pytest.mark.parametrize(("compares", "slots"), [(False, [0, 1]), (True, [0, 1, 0])])
    def test_process_runs_many_trials_but_one_of_a_comparison(
        self, slots: list[int], *, compares: bool
    ) -> None:
        made = self.run(COMPLETED, COMPLETED, COMPLETED, workers=2, compares=compares)
        assert [worker.slot for worker in Staged.made] == slots
        assert all(worker.connection.closed for worker in Staged.made)
        assert not any(worker.process.kill.called for worker in Staged.made)
        assert made._display.ended.call_count == 3

    def test_validation_is_answered_and_a_death_is_no_end(self) -> None:
        made = self.run((FirstBatch(), Report(2, {}), Report(4, {}), *COMPLETED))
        assert [Staged.made[0].theirs.recv() for _ in range(2)] == [True, False]
        made = self.run((DEAD,), COMPLETED)
        made._display.lost.assert_called_once_with(0, -15)
        made._study.lost.assert_called_once_with(0, -15)
        assert len(Staged.made) == 3
        assert not made.stopping

    def test_problem_of_the_machine_stops_the_other_trials(self) -> None:
        made = self.run(ended_by(RunState.STOPPED, "disk full"), (), workers=2)
        assert (made.blocked, made.stopping, made.time_is_up) == ("disk full", True, False)
        assert made._study.lost.call_count == 0

    @pytest.mark.parametrize("ending", ["terminate", "kill"])
    def test_time_limit_stops_what_runs_and_then_kills_it(
        self, ending: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Staged, "ending", ending)
        made = self.run((), (), time_limit=0.1)
        assert made.time_is_up
        (worker,) = Staged.made
        assert worker.process.kill.called is (ending == "kill")

    def test_signal_starts_no_further_trial(self) -> None:
        made = self.run(COMPLETED, COMPLETED, on_end=lambda made: made.on_signal(2, None))
        assert (made.stopping, made.time_is_up, made._study.next_job.call_count) == (True, False, 1)

    def test_error_leaves_no_worker_behind(self) -> None:
        with pytest.raises(OSError, match="full"):
            self.run(COMPLETED, (), workers=2, on_end=Mock(side_effect=OSError("full")))
        assert [worker.process.kill.called for worker in Staged.made] == [False, True]
        assert all(worker.connection.closed for worker in Staged.made)
