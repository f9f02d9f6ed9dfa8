"""Writes and reads the folder of a local run.

config.yaml      the configuration, with the trial and the seed filled in; a resume
                 reads it
run.json         the run: its state, why it ended, and its parts, see `Run`:
                 {"state": "stopped", "reason": "stopped by SIGINT",
                  "number": 0, "hparams": {},
                  "parts": [{"first_batch": 0, "settings": {...}, "machine": {...},
                             "date": ..., "command": [...]}]}
                 The settings of a part are all that were read, with every default.
                 Every resume that trains adds a part. The state of a killed run stays
                 "running". In a search `number` and `hparams` are the trial's number
                 and sampled values.
metrics.jsonl    one report per line: its `group`, `batches` and metrics. A scored trial
                 of a search has one report, of the group `validation`
tensorboard/     event files
checkpoints/     the newest checkpoint, the best one, and the newest with finite weights
log.txt          the log of Determined and of this package
.lock            the id of the process that writes here

A search has its trials in such folders, `trials/0000` and so on.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.files import write_whole
from determined_amp.experiment.machine import Machine
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.runs.run import Part, Run, RunState

# The files that mark the folder of a run and the folder of a search, and the commands
# that continue them.
RUN_FILE, STUDY_FILE = "run.json", "study.db"
_RESUMES = {
    RUN_FILE: "det-amp train --resume",
    STUDY_FILE: "det-amp search --resume",
}


@contextmanager
def lock(folder: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes from writing into a folder inside this block.

    Args:
        folder: The folder. The lock ends with the process, however the process ends.
        what: What the folder holds, for the error message.
        wait: Whether to wait for another process to finish.

    Raises:
        UserError: if another process holds the lock; the message has its id.
    """
    path = folder / ".lock"
    with path.open("ab+", buffering=0) as file:
        try:
            # Only this process holds the lock, not the loader processes that it forks.
            fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            holder = path.read_text().strip()
            raise UserError(
                f"{folder}: process {holder} is running {what}; allowed: wait until it "
                "ends, or stop it"
            ) from error
        file.truncate(0)
        with suppress(OSError):  # on a full disk the message cannot name the process
            file.write(f"{os.getpid()}\n".encode())
        yield


def is_locked(folder: Path) -> bool:
    """Whether another process writes into a folder, see `lock`."""
    with suppress(FileNotFoundError), (folder / ".lock").open("rb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class RunFolder:
    """Paths and files of one run; the folder is made if it does not exist.

    Args:
        path: The folder. A relative path is resolved at once, because the trial may
            change the current directory.

    Attributes:
        shown: The path as it was given.

    Raises:
        UserError: if the folder cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.shown, path = path, path.absolute()
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.record = path / RUN_FILE
        _make(self.checkpoints)

    @property
    def not_to_lose(self) -> list[str]:
        """What a new run would replace: checkpoints, or files that belong to no run."""
        replaced = complete_checkpoints(self.checkpoints)
        if not self.record.exists():
            replaced += [self.config, self.metrics]
        return [path.name for path in replaced if path.exists()]

    def describe(
        self, experiment: Experiment, machine: Machine, *, first_batch: int = 0
    ) -> Run:
        """Record that the run trains from now on, and what it trains.

        Args:
            experiment: What the run trains.
            machine: The machine that it trains on.
            first_batch: Number of batches trained before. Parts that began later are
                forgotten, because their batches are trained again.

        Returns:
            The run, with the new part.
        """
        part = Part(
            first_batch,
            experiment.settings,
            machine,
            datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            sys.argv,
        )
        before = (part for part in self._run().parts if part.first_batch < first_batch)
        # Write the file first that marks this folder as the folder of a run.
        run = self._change(state=RunState.RUNNING, reason="", parts=(*before, part))
        # A resume rewrites this file. After a kill, a later resume needs it whole.
        write_whole(self.config, dump_yaml(dict(experiment.config)))
        return run

    def describe_trial(self, number: int, hparams: Config) -> None:
        """Write that a trial of a search begins: its number, and its sampled values by
        name.
        """
        self._change(state=RunState.RUNNING, reason="", number=number, hparams=hparams)

    def end(self, state: RunState, reason: str = "") -> None:
        """Write how the run ended, and why."""
        self._change(state=state, reason=reason)

    def _run(self) -> Run:
        if self.record.exists():
            return read_record(self.path)
        return Run(str(self.path), RunState.RUNNING)

    def _change(self, **changes: Any) -> Run:
        """Write the run with these changes, and return it."""
        run = dataclasses.replace(self._run(), **changes)
        values = dataclasses.asdict(run)
        names = ("state", "reason", "number", "hparams", "parts")
        record = {name: values[name] for name in names}
        write_whole(self.record, json.dumps(record, indent=2) + "\n")
        return run

    def append_metrics(self, line: Values) -> None:
        """Add one report of numbers and texts."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def forget_metrics_after(self, batches: int) -> None:
        """Drop the reports of later batches, which a resumed run trains again."""
        kept = [
            json.dumps(line) + "\n"
            for line in read_metrics(self.metrics)
            if line["batches"] <= batches
        ]
        write_whole(self.metrics, "".join(kept))


def check_folder(folder: Path, files: Sequence[str], what: str) -> None:
    """Check that a folder belongs to a run, or to a search.

    Args:
        folder: What the user has given.
        files: The files of which it must have one, such as `RUN_FILE`.
        what: What is allowed.

    Raises:
        UserError: if the folder has none of the files. The message names the command
            for a folder of the other kind.
    """
    if any(os.path.exists(folder / file) for file in files):
        return
    for file, instead in _RESUMES.items():
        if os.path.exists(folder / file):
            raise UserError(f"{folder}: has {file}; type {instead} {folder}")
    missing = f"has no {' or '.join(files)}"
    if not os.path.isdir(folder):
        missing = "there is no such folder that can be read"
    raise UserError(f"{folder}: {missing}; allowed: {what}")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    return sorted(
        path for path in folder.glob("batch-*") if (path / "metadata.json").exists()
    )


def read_record(folder: Path) -> Run:
    """The run in a folder as it is recorded there, without its reports.

    Raises:
        UserError: if there is no record, or it is damaged.
    """
    file = folder / RUN_FILE
    try:
        record = json.loads(file.read_bytes())
        parts = (
            Part(**{**p, "machine": Machine(**p["machine"])}) for p in record["parts"]
        )
        values = {**record, "state": RunState(record["state"]), "parts": tuple(parts)}
        return Run(str(folder), **values)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder}: is not a run folder that this version reads: {RUN_FILE}: "
            f"{type(error).__name__} {one_line(error)}; allowed: what `det-amp "
            "train` leaves in runs/NAME/TIME"
        ) from error


def read_run(folder: Path) -> Run:
    """The run in a folder, with its reports, and with its state judged by them.

    Raises:
        UserError: if the folder is not a run folder, or its reports are damaged.
    """
    run = read_record(folder)
    if run.state is RunState.RUNNING and not is_locked(folder):
        run = dataclasses.replace(run, state=RunState.KILLED)
    return run.reported(read_metrics(folder / "metrics.jsonl"))


def trial_folder(search: Path, number: int) -> Path:
    """The run folder of a trial of the search in a folder."""
    return search / "trials" / f"{number:04d}"


def read_metrics(path: Path) -> Iterator[Values]:
    """The reports in a `metrics.jsonl`, one after the other; none without the file.

    A last line that a kill cut off is left out.

    Raises:
        UserError: if another line is no report.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
                line["group"] = str(line["group"])
                line["batches"] = int(line["batches"])
            except (LookupError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path}: line {number} is no report; allowed: the file without "
                    "this line"
                ) from error
            yield line


def fresh_folder(name: str) -> Path:
    """Create and return a new folder `runs/name/TIME`.

    Characters of `name` that do not belong in a file name, such as slashes, become a
    hyphen.

    Raises:
        UserError: if the folder cannot be made.
    """
    name = re.sub(r"[^\w.+=@ -]+", "-", name).strip(". ")[:100] or "unnamed"
    # With microseconds: several runs may begin in one second.
    path = Path("runs") / name / datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    _make(path)
    return path


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {error.filename}: {error.strerror}; allowed: a "
            "new one, or that of a run"
        ) from error
