"""`make` and the environment of the checkout: it touches none that it did not make."""

import os
import re
import shutil
import subprocess

import pytest
from packaging.specifiers import SpecifierSet

from tests.run_here import ROOT

# In the place of Python, pip and uv: it notes its arguments, and makes an environment.
STUB = """#!/bin/sh
echo "$(basename "$0") $*" >> calls.txt
if [ "$2" = venv ]; then
    for last; do :; done
    mkdir -p "$last/bin"
    echo "prompt = '$4'" > "$last/pyvenv.cfg"
    for name in python pip uv; do cp "$0" "$last/bin/$name"; done
fi
"""


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stub = tmp_path / "stub"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tmp_path


def make(checkout, *targets):
    command = ["make", *targets, f"PYTHON={checkout / 'stub'}"]
    # `make test` itself may run this test, with variables of its own.
    outside = {"PATH": os.environ["PATH"]}
    return subprocess.run(
        command, cwd=checkout, env=outside, capture_output=True, text=True, check=False
    )


def calls(checkout):
    return (checkout / "calls.txt").read_text().splitlines()


@pytest.mark.parametrize("target", ["install", "run", "test", "lint"])
def test_environment_of_the_user_is_refused_in_one_sentence_and_kept(checkout, target):
    (checkout / ".venv" / "lib").mkdir(parents=True)
    (checkout / ".venv" / "pyvenv.cfg").write_text("prompt = 'mine'\n")
    done = make(checkout, target)
    assert done.returncode == 2
    said, of_make = done.stderr.splitlines()
    assert said.startswith(".venv: make has not made it, so it stays as it is; allowed")
    assert said.endswith(f"make {target} ENV=.venv-make")
    assert of_make.startswith("make: ***")
    assert not (checkout / "calls.txt").exists()
    make(checkout, "clean")
    assert (checkout / ".venv" / "lib").is_dir()


def test_environment_of_make_is_set_up_again_without_being_cleared(checkout):
    assert make(checkout, "install").returncode == 0
    assert any("venv --prompt" in line for line in calls(checkout))
    (checkout / ".venv" / "mine").touch()
    before = len(calls(checkout))
    assert make(checkout, "install").returncode == 0  # nothing has changed
    assert len(calls(checkout)) == before
    later = (checkout / ".venv" / "ready").stat().st_mtime + 2
    os.utime(checkout / "pyproject.toml", (later, later))
    assert make(checkout, "install").returncode == 0
    again = calls(checkout)[before:]
    assert [line for line in again if "venv --" in line] == []
    assert any("--all-extras" in line for line in again)
    assert (checkout / ".venv" / "mine").exists()
    make(checkout, "clean")
    assert not (checkout / ".venv").exists()


def test_pip_refuses_a_python_that_make_does_not_take():
    project = (ROOT / "pyproject.toml").read_text()
    required = re.search(r'^requires-python = "(.*?)"', project, re.M)
    assert required is not None
    allowed = SpecifierSet(required[1])
    minors = [minor for minor in range(8, 16) if f"3.{minor}.1" in allowed]
    assert minors == [10, 11, 12]
    of_make = "(3, {}) <= sys.version_info[:2] <= (3, {})".format(*minors[::2])
    assert of_make in (ROOT / "Makefile").read_text()
