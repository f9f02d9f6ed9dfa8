"""The commands of the README that need no cluster, as a new user types them.

`make test-readme` clones the repository, installs it as the README says, and runs every
command in another folder. `make test` runs one of them with this environment.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from determined_amp import __main__ as door
from tests.pages import commands
from tests.run_here import ROOT

COMMANDS = commands((ROOT / "README.md").read_text())
OURS = "det-amp "
# The lines that a new user types once; the test of the whole page does what they do.
SET_UP = ("git clone ", "cd ", "make compare ")
# What only the folder of the clone has: its examples, and the runs of them.
OF_THE_CLONE = ("experiment_configs/", "hp_search/", "runs/")


def with_names(command, clone, runs):
    """The words of a command, with the files of a user's own and the paths of the
    clone.
    """
    words = shlex.split(command)
    words = ["amp.yaml" if word == "YOUR_YAML" else word for word in words]
    newest = max(runs.glob("runs/mlp-amp/*"), default=Path("none"))
    words = [str(newest) if word == "runs/mlp-amp/TIME" else word for word in words]
    return [str(clone / word) if (clone / word).is_file() else word for word in words]


@pytest.fixture
def own_folder(tmp_path):
    """A folder of a user, with a trial, its YAML and a script."""
    folder = tmp_path / "mine"
    shutil.copytree(ROOT / "docs" / "your_trial", folder)
    shutil.copy(ROOT / "docs" / "any_loop" / "train.py", folder)
    return folder


def test_every_command_of_the_readme_is_known():
    known = (OURS, "det experiment create ", *SET_UP)
    assert [command for command in COMMANDS if not command.startswith(known)] == []
    assert len([command for command in COMMANDS if command.startswith(OURS)]) > 5


def test_find_command_of_the_readme_runs_in_another_folder(own_folder, monkeypatch):
    (command,) = [each for each in COMMANDS if each.startswith(f"{OURS}find ")]
    monkeypatch.chdir(own_folder)
    assert door.main(with_names(command, ROOT, own_folder)[1:]) == 0


@pytest.mark.readme
def test_all_commands_of_the_readme_run_from_a_fresh_clone(tmp_path, own_folder):
    clone = tmp_path / "clone"
    program = clone / ".venv" / "bin" / "det-amp"
    without_ours = {
        key: value for key, value in os.environ.items() if key != "PYTHONPATH"
    }

    def call(*words, folder=None):
        subprocess.run([*map(str, words)], check=True, cwd=folder, env=without_ours)

    call("git", "clone", "--quiet", ROOT, clone)
    call("make", "-C", clone, "install")
    for command in COMMANDS:
        if command.startswith(OURS):
            is_of_the_clone = any(name in command for name in OF_THE_CLONE)
            folder = clone if is_of_the_clone else own_folder
            _, *words = with_names(command, clone, folder)
            call(program, *words, folder=folder)
