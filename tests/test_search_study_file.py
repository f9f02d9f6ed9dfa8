"""A file is read as a study only if a search made it, and any other is left as it was."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import optuna
import pytest

from determined_amp.search.study_file import (
    FILE_NAME,
    StudyError,
    create_study,
    read_study,
    storing,
)
from tests import training


class TestLoadStudy:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(StudyError, match="there is no such file"):
            read_study(tmp_path)

    def test_not_a_database(self, tmp_path: Path) -> None:
        (tmp_path / FILE_NAME).write_text("PK")
        with pytest.raises(StudyError, match="is not a study: file is not a database"):
            read_study(tmp_path)

    def test_another_database_is_left_untouched(self, tmp_path: Path) -> None:
        file = tmp_path / "other.db"
        with sqlite3.connect(file) as other:
            other.execute("CREATE TABLE mine (x)")
        before = file.read_bytes()
        with pytest.raises(StudyError, match="no such table"):
            read_study(file)
        assert file.read_bytes() == before

    def test_study_of_a_folder_with_an_odd_name_is_read(self, tmp_path: Path) -> None:
        folder = tmp_path / "a b%20?mode=rw#"
        folder.mkdir()
        search = {"name": "odd", "searcher": {"metric": "loss"}}
        create_study(folder, search)
        assert read_study(folder).search == search
        assert [path.name for path in folder.iterdir()] == [FILE_NAME]

    @pytest.mark.parametrize(
        ("table", "key", "value"),
        [
            ("study_user_attributes", "search", "5"),
            ("study_user_attributes", "search", '{"searcher": []}'),
            ("study_user_attributes", "search", '{"searcher": {}, "hyperparameters": 5}'),
            ("study_user_attributes", "workers", '"two"'),
            ("study_user_attributes", "search", "{not JSON"),
            ("trial_user_attributes", "history", "null"),
            ("trial_user_attributes", "history", "[5]"),
            ("trial_user_attributes", "history", '[[1, {"loss": "low"}]]'),
            ("trial_user_attributes", "used", '"x"'),
            ("trial_user_attributes", "bracket", '"x"'),
            ("trial_system_attributes", "fixed_params", "null"),
        ],
    )
    def test_attribute_that_no_search_writes_is_named(
        self, tmp_path: Path, table: str, key: str, value: str
    ) -> None:
        study = create_study(tmp_path, {"name": "x", "searcher": {"metric": "loss"}})
        study.set_user_attr("workers", 2)
        study.enqueue_trial({"x": 1})
        trial = study.ask()
        for name, sound in (("history", [[1, {"loss": 0.5}]]), ("used", {}), ("bracket", 0)):
            trial.set_user_attr(name, sound)
        assert read_study(tmp_path).workers == 2
        with sqlite3.connect(tmp_path / FILE_NAME) as database:
            change = f"UPDATE {table} SET value_json = ? WHERE key = ?"
            assert database.execute(change, (value, key)).rowcount
        with pytest.raises(StudyError, match=r"study\.db: is (damaged|not a study)"):
            read_study(tmp_path)

    def test_another_optuna_study(self, tmp_path: Path) -> None:
        optuna.create_study(storage=f"sqlite:///{tmp_path / 'other.db'}")
        with pytest.raises(StudyError, match="is not a study that"):
            read_study(tmp_path / "other.db")

    def test_database_on_a_full_disk_is_one_sentence(self, tmp_path: Path) -> None:
        trial = create_study(tmp_path, {"name": "x", "searcher": {"metric": "loss"}}).ask()
        size = (tmp_path / FILE_NAME).stat().st_size
        refused = pytest.raises(
            StudyError, match=r"study\.db: cannot be read or written: .*--resume"
        )
        with refused, storing(tmp_path), training.no_file_larger_than(size):
            trial.set_user_attr("used", {"text": "x" * 10**5})
        assert [found.state for found in read_study(tmp_path).trials] == ["running"]

    def test_study_whose_writer_was_killed_in_a_transaction_is_read(self, tmp_path: Path) -> None:
        """Such a file has a hot journal, which nobody who may only read can roll back."""
        search = {"name": "killed", "searcher": {"metric": "loss"}}
        create_study(tmp_path, search)
        write = (
            "import os, sqlite3; study = sqlite3.connect('study.db'); "
            "study.execute('PRAGMA cache_size = 2'); study.execute('CREATE TABLE big (x)'); "
            "study.executemany('INSERT INTO big VALUES (?)', [('x' * 4000,)] * 200); os._exit(9)"
        )
        assert (
            subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=False).returncode == 9
        )
        assert (tmp_path / f"{FILE_NAME}-journal").stat().st_size > 0
        assert read_study(tmp_path).search == search
