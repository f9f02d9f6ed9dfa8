"""A file is read as a study only if a search made it, and any other is left as it was."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from determined_amp.runs.folder import RunError, RunFolder
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import STUDY_FILE, read_search
from determined_amp.search.study import SearchStudy, StudyError, create_study, storing
from tests import searching, training


def study_in(folder: Path) -> SearchStudy:
    config = searching.load(folder, "loss_scale_grid.yaml", *searching.THREE_SCALES)
    return SearchStudy(searching.plan(config), folder)


def new_study(folder: Path) -> SearchStudy:
    create_study(folder, searching.load(folder, "loss_scale_grid.yaml"))
    return study_in(folder)


def test_folder_without_a_search_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"search\.yaml: there is no such file"):
        read_search(tmp_path)
    (tmp_path / "search.yaml").touch()
    with pytest.raises(RunError, match=r"study\.db: there is no such file"):
        read_search(tmp_path)


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
    last = again.next_job()
    assert last is not None
    assert (last[0], again.next_job()) == (2, None)


def test_trial_whose_folder_has_its_end_is_not_run_again(tmp_path: Path) -> None:
    """The search was killed before the study had it."""
    first = new_study(tmp_path).next_job()
    assert first is not None
    number, job = first
    folder = RunFolder(job.folder)
    report = {"group": "validation", "batches": 2, "loss_scale_score": 0.5}
    folder.append_metrics(report)
    folder.end(RunState.COMPLETED)
    following = study_in(tmp_path).next_job()
    assert following is not None
    assert (number, following[0]) == (0, 1)


def test_database_on_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    refused = pytest.raises(StudyError, match=r"study\.db: cannot be read or written: .*--resume")
    with refused, storing(tmp_path), training.no_file_larger_than(1000):
        study.next_job()
    job = study_in(tmp_path).next_job()
    assert job is not None
    assert job[0] == 0


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
