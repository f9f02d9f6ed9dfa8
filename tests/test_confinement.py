"""No file of the user changes while a script or a trial is checked, however it ends."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from determined_amp import __main__ as door
from tests.habits import Habit
from tests.test_check import experiment
from tests.training import outcome
from tests.writes import WRITES, files_of, make_files

COMMAND = ("-W", "ignore", "-m", "determined_amp", "check")

# Changes the files of a user in every way, each way in a folder of its own.
SCRIPT = """
import os, sys, time, torch
from tests.writes import WRITES

torch.ones(1, requires_grad=True).sum().backward()
for way, (change, look, expected) in WRITES.items():
    os.chdir(way)
    change()
    if look() != expected:
        sys.exit(f"{way}: {look()!r}, not {expected!r}")
    os.chdir("..")
print("changed", flush=True)
time.sleep(float(sys.argv[1]))
"""

# Does what no redirection by path can redirect.
REFUSED = """
import io, os, posix, sys
from determined_amp.check import confinement

allowed, by_landlock = sys.argv[1], sys.argv[2] == "landlock"
if not by_landlock:
    confinement._confined_by_landlock = lambda folders: False
confinement.confine([allowed])

def is_refused(change, *given):
    try:
        change(*given)
    except PermissionError:
        return True

here = os.open(".", os.O_RDONLY)
assert is_refused(io.FileIO, "best.pt", "w")
assert is_refused(io.FileIO, "new.pt", "a")
assert is_refused(posix.remove, "best.pt")
assert is_refused(posix.truncate, "best.pt", 0)
assert is_refused(posix.rename, "best.pt", f"{allowed}/best.pt")
assert is_refused(posix.rename, f"{allowed}/mine", "best.pt")
assert is_refused(posix.mkdir, "new")
assert is_refused(posix.rmdir, "empty")
assert is_refused(lambda: posix.remove("best.pt", dir_fd=here))
assert open("best.pt").read() == "the user's best.pt"
for place in (f"{allowed}/new", "/dev/null"):
    with open(place, "w") as file:
        file.write("mine")
os.rename(f"{allowed}/new", f"{allowed}/folder/renamed")
if by_landlock:
    import ctypes, sqlite3, subprocess

    libc = ctypes.CDLL(None)
    assert libc.unlink(b"best.pt") == libc.truncate(b"best.pt", 0) == -1
    assert subprocess.run(["rm", "best.pt"]).returncode
    try:
        sqlite3.connect("new.db").execute("create table t (a)")
    except sqlite3.OperationalError:
        pass
"""

# As the tutorial of DDP does it.
TWO_RANKS = """
import os, torch
from torch import distributed

torch.ones(1, requires_grad=True).sum().backward()
distributed.init_process_group("gloo")
rank = distributed.get_rank()
if rank == 0:
    torch.save({"rank": 0}, "checkpoint.pt")
distributed.barrier()
loaded = torch.load("checkpoint.pt")
os.write(1, f"loaded {loaded}\\n".encode())  # in one piece, beside the other rank
distributed.barrier()
if rank == 0:
    os.remove("checkpoint.pt")
distributed.barrier()
assert not os.path.exists("checkpoint.pt")
"""


class Removes(Habit):
    """Changes files of its user's when it is made."""

    def net(self) -> object:
        Path("best.pt").unlink(missing_ok=True)
        Path("log.txt").write_text("!")
        subprocess.run(["rm", "-f", "last.pt"], check=False)
        return super().net()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script of a user is, and files; scratch folders are in another one."""
    folder = tmp_path / "user"
    folder.mkdir()
    make_files(folder)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(folder)
    return folder


def is_removed(folder: Path) -> bool:
    """Whether the scratch folders are removed, by and by."""
    for _ in range(100):
        if not any((folder.parent / "tmp").glob("determined_amp-*")):
            return True
        time.sleep(0.1)
    return False


@contextmanager
def checked(folder: Path, seconds: int) -> Iterator[subprocess.Popen[str]]:
    """A command that checks `SCRIPT`, when that has changed all it changes."""
    for way in WRITES:
        (folder / way).mkdir()
        make_files(folder / way)
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, *COMMAND, "train.py", str(seconds)]
    before = files_of(folder)
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "changed\n"
        assert list((folder.parent / "tmp").glob("determined_amp-*/files"))
        yield run
    assert files_of(folder) == before
    assert is_removed(folder)


def test_no_file_of_the_user_changes_in_any_way(folder: Path) -> None:
    with checked(folder, 0) as run:
        run.communicate()
    assert run.returncode == 0


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_no_file_of_the_user_changes_when_the_command_is_ended(
    folder: Path, number: signal.Signals, status: int
) -> None:
    with checked(folder, 1000) as run:
        run.send_signal(number)
        run.communicate()
    assert run.returncode == status


# This asks for the version of Landlock.
HAS_LANDLOCK = (
    sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) > 1
)


@pytest.mark.parametrize(
    "means",
    [
        pytest.param("landlock", marks=pytest.mark.skipif(not HAS_LANDLOCK, reason="")),
        "hook",
    ],
)
def test_what_is_not_redirected_is_refused_before_it_happens(
    folder: Path, tmp_path: Path, means: str
) -> None:
    allowed = tmp_path / "allowed"
    (allowed / "folder").mkdir(parents=True)
    (allowed / "mine").touch()
    (folder / "empty").mkdir()
    before = files_of(folder)
    ran = outcome("-c", REFUSED, str(allowed), means, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert files_of(folder) == before


def test_all_ranks_of_a_launcher_have_one_scratch_folder(folder: Path) -> None:
    (folder / "train.py").write_text(TWO_RANKS)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    before = files_of(folder)
    ran = outcome(*launcher, *COMMAND[2:], "train.py", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("loaded {'rank': 0}\n") == 2
    assert files_of(folder) == before
    assert is_removed(folder)


@pytest.mark.usefixtures("_workers_import_once")
def test_no_file_of_the_user_changes_while_a_trial_is_checked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "planted.yaml").write_text(yaml.safe_dump(experiment()))
    before = files_of(folder)
    trial = "tests.test_confinement:Removes"
    assert door.main(["check", "planted.yaml", "--trial", trial]) == 0
    assert capsys.readouterr().out.startswith("no AMP was used: 20 batches, ")
    assert files_of(folder) == before
