"""What a checked script changes, changes in a scratch folder, and it sees that."""

import glob
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from determined_amp.check.scratch import Scratch, changing_only
from tests.writes import WRITES, files_of, make_files, names, text, write


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with files of the user."""
    folder = tmp_path / "user"
    folder.mkdir()
    make_files(folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def scratch(folder, tmp_path):
    """What is changed in the test is changed there."""
    (tmp_path / "scratch").mkdir()
    scratch = Scratch(str(tmp_path / "scratch"))
    with changing_only(scratch):
        yield scratch


@pytest.mark.parametrize("way", WRITES)
def test_script_sees_its_own_change_and_no_file_of_the_user_has_it(
    folder, tmp_path, monkeypatch, way
):
    # An import that is blocked, and a module of another kind.
    monkeypatch.setitem(sys.modules, "blocked", None)
    monkeypatch.setitem(sys.modules, "of_another_kind", object())
    before = files_of(folder)
    change, look, expected = WRITES[way]
    (tmp_path / "scratch").mkdir()
    with changing_only(Scratch(str(tmp_path / "scratch"))):
        change()
        assert look() == expected
    assert files_of(folder) == before


@pytest.mark.parametrize("way", WRITES)
def test_script_without_a_scratch_folder_changes_the_users_files_and_sees_the_same(
    folder, way
):
    before = files_of(folder)
    change, look, expected = WRITES[way]
    change()
    assert look() == expected
    assert files_of(folder) != before


@pytest.mark.usefixtures("scratch")
class TestView:
    """What a script sees is one folder: the user's, with its own changes."""

    def test_removed_file_is_missed_under_the_name_that_was_asked(self):
        os.remove("best.pt")
        for look in (open, torch.load, os.stat, os.remove, os.listdir):
            with pytest.raises(FileNotFoundError) as raised:
                look("best.pt")
            assert raised.value.filename == "best.pt"

    def test_files_are_listed_and_found_by_patterns(self):
        write("new.txt", "x")
        os.remove("last.pt")
        here = [
            "best.pt",
            "latest",
            "link.txt",
            "log.txt",
            "new.txt",
            "old",
            "previous.pt",
        ]
        assert names() == here
        assert sorted(path.name for path in Path().iterdir()) == here
        assert sorted(glob.glob("*.txt")) == ["link.txt", "log.txt", "new.txt"]
        with os.scandir() as entries:
            kinds = {each.name: (each.is_dir(), each.is_symlink()) for each in entries}
        assert kinds["old"] == (True, False)
        assert kinds["latest"] == (True, True)
        assert kinds["new.txt"] == (False, False)

    def test_errors_are_those_of_the_users_folder(self):
        for change, error in (
            (lambda: write("missing/new", "w"), FileNotFoundError),
            (lambda: write("best.pt", "x"), FileExistsError),
            (lambda: write("old", "w"), IsADirectoryError),
            (lambda: os.remove("old"), IsADirectoryError),
            (lambda: os.mkdir("old"), FileExistsError),
            (lambda: os.rmdir("best.pt"), NotADirectoryError),
            (lambda: os.rename("best.pt", "old"), IsADirectoryError),
            (lambda: os.open("missing", os.O_WRONLY), FileNotFoundError),
        ):
            with pytest.raises(error):
                change()
        with pytest.raises(OSError, match="not empty"):
            os.rmdir("old")
        assert text("old/a") == "the user's old/a"

    def test_no_path_is_not_the_working_directory(self):
        write("new.txt", "x")
        assert not os.path.exists("")

    def test_events_of_tensorboard_are_found(self):
        with SummaryWriter("old/events") as writer:
            writer.add_scalar("loss", 1.0, 0)
        assert len(names("latest/events")) == 1


def test_processes_share_what_one_has_changed(folder, scratch):
    os.remove("best.pt")
    write("old/a", "a")
    child = multiprocessing.get_context("fork").Process(
        target=write, args=("new.txt", "x")
    )
    child.start()
    child.join()
    again = Scratch(scratch.folder)
    assert text("new.txt") == "!"
    assert again.look("old/a") == scratch.look("old/a") != str(folder / "old/a")


def test_caches_stay_where_they_are_unless_the_script_is_in_one(folder, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(folder / "old"))
    scratch = Scratch(str(folder.parent / "scratch"))
    assert scratch.name("old/new") == str(folder / "old/new")
    monkeypatch.setenv("TORCH_HOME", str(folder.parent))
    assert str(folder.parent) not in Scratch(scratch.folder).writable


def test_scratch_folder_can_be_made_again(scratch):
    os.makedirs(scratch.folder, exist_ok=True)
    write(f"{scratch.folder}/new.txt", "x")
    assert text(f"{scratch.folder}/new.txt") == "!"


def test_folder_that_is_there_is_not_touched_by_making_it_again(scratch):
    write("new.txt", "x")
    before = files_of(Path(scratch.folder))
    for make in (os.mkdir, os.mkfifo, lambda name: os.symlink("best.pt", name)):
        with pytest.raises(FileExistsError):
            make("old")
    assert files_of(Path(scratch.folder)) == before


def test_nothing_in_the_scratch_folder_has_a_shadow(scratch):
    os.rename("old", "older")
    write("older/new", "x")
    os.rename("older/deep", "older/deeper")
    write("older/deeper/new", "x")
    assert not os.path.exists(f"{scratch.folder}/files{scratch.folder}")


def test_functions_that_a_module_has_kept_are_pythons_own_afterwards(folder, tmp_path):
    (tmp_path / "scratch").mkdir()
    with changing_only(Scratch(str(tmp_path / "scratch"))):
        kept = open
    with kept("log.txt", "w") as file:
        file.write("!")
    assert (folder / "log.txt").read_text() == "!"
