"""No file of the user changes while a script or a trial is checked, however it ends."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from determined_amp import __main__ as door
from determined_amp.check import scratch
from determined_amp.check.confinement import confine
from tests.habits import Habit
from tests.run_here import fork, outcome, wait
from tests.test_check import experiment
from tests.writes import WRITES, files_of, make_files

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

    def net(self):
        Path("best.pt").unlink(missing_ok=True)
        Path("log.txt").write_text("!")
        subprocess.run(["rm", "-f", "last.pt"], check=False)
        return super().net()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the script of a user is, and files; scratch folders are in another one."""
    folder = tmp_path / "user"
    folder.mkdir()
    make_files(folder)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(folder)
    return folder


def happens(holds):
    """Whether something comes true by and by."""
    for _ in range(200):
        if holds():
            return True
        time.sleep(0.05)
    return False


def is_removed(folder):
    """Whether the scratch folders are removed, by and by."""
    scratch_folders = (folder.parent / "tmp").glob
    return happens(lambda: not any(scratch_folders("determined_amp-*")))


def check(*arguments):
    """The command, in a process of its own that stays confined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "confine", confine)
        return door.main(["check", "train.py", *arguments])


@contextmanager
def checked(folder, seconds, status):
    """A process that checks `SCRIPT`, when that has changed all it changes."""
    for way in WRITES:
        (folder / way).mkdir()
        make_files(folder / way)
    (folder / "train.py").write_text(SCRIPT)
    before, log = files_of(folder), folder.parent / "log"
    log.touch()
    child = fork(lambda: check(str(seconds)), log)
    assert happens(lambda: "changed\n" in log.read_text()), log.read_text()
    yield child
    assert wait(child) == status, log.read_text()
    assert files_of(folder) == before
    assert is_removed(folder)


def test_no_file_of_the_user_changes_in_any_way(folder):
    with checked(folder, seconds=0, status=0):
        pass


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_no_file_of_the_user_changes_when_the_command_is_ended(folder, number, status):
    with checked(folder, seconds=1000, status=status) as child:
        assert list((folder.parent / "tmp").glob("determined_amp-*/files"))
        os.kill(child, number)


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
def test_what_is_not_redirected_is_refused_before_it_happens(folder, tmp_path, means):
    allowed = tmp_path / "allowed"
    (allowed / "folder").mkdir(parents=True)
    (allowed / "mine").touch()
    (folder / "empty").mkdir()
    before = files_of(folder)
    ran = outcome("-c", REFUSED, str(allowed), means, cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert files_of(folder) == before


def launch():
    """As `torchrun --nproc-per-node 2` does, in forks of this process."""
    ranks = LaunchConfig(1, 1, 2, rdzv_backend="c10d", start_method="fork")
    ranks.rdzv_endpoint = "localhost:0"
    assert elastic_launch(ranks, check)() == {0: 0, 1: 0}


def test_all_ranks_of_a_launcher_have_one_scratch_folder(folder):
    (folder / "train.py").write_text(TWO_RANKS)
    before, log = files_of(folder), folder.parent / "log"
    assert wait(fork(launch, log)) == 0, log.read_text()
    assert log.read_text().count("loaded {'rank': 0}\n") == 2
    assert files_of(folder) == before
    assert is_removed(folder)


@pytest.mark.usefixtures("_workers_are_forks")
def test_no_file_of_the_user_changes_while_a_trial_is_checked(
    folder, capsys, monkeypatch
):
    monkeypatch.setattr(scratch, "confine", confine)
    (folder / "planted.yaml").write_text(yaml.safe_dump(experiment()))
    before = files_of(folder)
    trial = "tests.test_confinement:Removes"
    assert door.main(["check", "planted.yaml", "--trial", trial]) == 0
    assert capsys.readouterr().out.startswith("no AMP was used: 20 batches, ")
    assert files_of(folder) == before
