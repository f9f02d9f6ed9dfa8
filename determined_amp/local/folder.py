"""The folder of a local run.

config.yaml        the configuration, with the trial and the seed filled in
resolved.yaml      the same with every default filled in; training from it gives the same run
environment.json   versions, device, commit, command and date of the first start
metrics.jsonl      one report per line
tensorboard/       event files
checkpoints/       the newest and the best checkpoint
log.txt            the log of Determined and of this package
ended.json         how the run ended; absent while it runs and after a kill
.lock              the id of the process that writes here
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import determined as det
import numpy as np
import torch

from determined_amp.amp.precision import DeviceSupport
from determined_amp.experiment.errors import UserError
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.yaml_text import dump_yaml

logger = logging.getLogger(__name__)

_END = "ended.json"


class FolderError(UserError):
    """A folder cannot be made."""


class FolderInUseError(UserError):
    """Another process writes into the folder."""


@contextmanager
def lock(folder: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes from writing into a folder inside this block.

    Args:
        folder: The folder. The lock ends with the process, however the process ends.
        what: What the folder holds, for the error message.
        wait: Whether to wait for another process to finish.

    Raises:
        FolderInUseError: if another process holds the lock; the message has its id.
    """
    with (folder / ".lock").open("a+") as file:
        try:
            # Only this process holds the lock, not the loader processes that it forks.
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip()
            process = f"process {holder}" if holder.isdecimal() else "another process"
            raise FolderInUseError(
                f"{folder}: {process} is running {what}; allowed: wait until it ends, or stop it"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@dataclasses.dataclass(frozen=True)
class End:
    """How a run ended.

    Args:
        state: `completed`, `stopped` (it can be resumed) or `failed`.
        reason: The signal that stopped it, or the error that ended it; empty if it completed.
        batches: Batches trained up to the last report, including those before a resume.
    """

    state: str
    reason: str
    batches: int


class RunFolder:
    """Paths and files of one run.

    Args:
        path: The folder; it is made if it does not exist.

    Raises:
        FolderError: if it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.end = path / _END
        self._made = _missing(path)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(
                f"cannot make the folder {error.filename}: {error.strerror}; allowed: a new one, "
                "or that of a run"
            ) from error

    @staticmethod
    def new(root: Path, name: str) -> RunFolder:
        """Make the folder of a run that starts now."""
        above = _missing(root)
        folder = RunFolder(fresh_folder(root, name))
        folder._made = [folder.path, folder.path.parent, *above]
        return folder

    def discard(self) -> None:
        """Remove the folder and its empty parents, if they were made for this run.

        A folder that was there before stays as it is.
        """
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)
        for path in self._made[1:]:
            with suppress(OSError):  # it has other runs
                path.rmdir()

    def describe(self, experiment: Experiment[Any], *, resumed: bool = False) -> None:
        """Write the configuration, and the environment unless a resumed run has it already."""
        # A resume rewrites these files, and a later one needs them: a kill must not truncate them.
        write_whole(self.config, dump_yaml(dict(experiment.config)))
        text = dump_yaml(experiment.resolved())
        write_whole(self.path / "resolved.yaml", text)
        file = self.path / "environment.json"
        if not (resumed and file.exists()):
            write_whole(file, json.dumps(environment(), indent=2) + "\n")

    @contextmanager
    def locked(self, *, wait: bool = False) -> Iterator[None]:
        """Keep other processes from writing here inside this block.

        Args:
            wait: Whether to wait for another process to finish.

        Raises:
            FolderInUseError: if another process writes here.
        """
        with lock(self.path, "this run", wait=wait):
            yield

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one report of numbers and texts."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The reports so far."""
        return read_metrics(self.metrics)

    def forget_metrics_after(self, batches: int) -> None:
        """Drop the reports of later batches, which a resumed run trains again."""
        kept = [line for line in self.read_metrics() if line["batches"] <= batches]
        write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def record_end(self, end: End) -> None:
        """Write how the run ended."""
        write_whole(self.end, json.dumps(dataclasses.asdict(end), indent=2) + "\n")

    def forget_end(self) -> None:
        """Remove the record of the end, because the run starts or continues."""
        self.end.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: a killed process leaves the old content or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def read_end(folder: Path) -> End | None:
    """How the run in a folder ended; None while it runs, and after a kill.

    Raises:
        ValueError: if the record is damaged.
    """
    try:
        record = json.loads((folder / _END).read_text())
        return End(str(record["state"]), str(record["reason"]), int(record["batches"]))
    except FileNotFoundError:
        return None
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / _END}: is not a record of how a run ended") from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The reports in a `metrics.jsonl`; none without the file.

    A last line that a kill cut off is left out. Any other line that is not a report is damaged, and
    is left out with a warning.
    """
    if not path.exists():
        return
    damaged = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        report = _report(line)
        if report is not None:
            yield report
        elif line and number < len(lines):
            damaged.append(number)
    if damaged:
        shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        logger.warning("%s: left out what is no report, in line %s", path, shown)


def _report(line: bytes) -> dict[str, Any] | None:
    """The report in a line; None if the line is not a report."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("group"), str):
        return None
    return found if type(found.get("batches")) is int else None


def _missing(path: Path) -> list[Path]:
    """The folders to make so that `path` exists, innermost first."""
    return [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]


def fresh_folder(root: Path, name: str) -> Path:
    """Create and return a new folder `root/name/TIME`.

    Characters of `name` that do not belong in a file name, such as slashes, become a hyphen.

    Raises:
        FolderError: if it cannot be made.
    """
    name = re.sub(r"[^\w.+=@ -]+", "-", name).strip(". ")[:100] or "unnamed"
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        path = root / name / (stamp + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise FolderError(f"cannot make the folder {path}: {error.strerror}") from error
        return path
    raise FileExistsError(f"{root / name}: a thousand runs in one second")


def environment() -> dict[str, Any]:
    """Date, command, commit, versions and device of this process."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": _version("torchvision"),
        "determined": det.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": dataclasses.asdict(DeviceSupport.of(device)),
        "processors": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    """The version of an optional package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the working directory, with `-dirty` after changes; None outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(describe, cwd=Path.cwd(), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
