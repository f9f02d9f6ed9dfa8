"""The folder that a local run leaves behind.

config.yaml        the configuration as it was given, with the trial and the seed written down
resolved.yaml      the same with every default filled in: it trains the same again
environment.json   versions, device, commit, command, date
metrics.jsonl      one report per line
tensorboard/       event files
checkpoints/       the newest and the best one
log.txt            what Determined logs
ended.json         how the run ended; absent while it runs and after a kill
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import determined as det
import numpy as np
import torch
import yaml

from determined_amp.amp.precision import DeviceSupport
from determined_amp.config.experiment import Experiment

_END = "ended.json"


@dataclasses.dataclass(frozen=True)
class End:
    """How a run ended.

    Args:
        state: `completed`, `stopped` (it can be resumed) or `failed`.
        reason: Which signal stopped it, or the error it failed by; empty if it completed.
        batches: Batches trained up to the last report, those before a resume included.
    """

    state: str
    reason: str
    batches: int


class RunFolder:
    """Paths and files of one run.

    Args:
        path: The folder; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.log = path / "log.txt"
        self.end = path / _END
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def new(root: Path, name: str) -> RunFolder:
        """The folder of a run that starts now."""
        return RunFolder(fresh_folder(root, name))

    def describe(self, experiment: Experiment[Any]) -> None:
        """Write what was run and on what."""
        # A resume writes it again, and needs it the next time: never half of it.
        write_whole(self.config, yaml.safe_dump(dict(experiment.config), sort_keys=False))
        text = yaml.safe_dump(experiment.resolved(), sort_keys=False)
        write_whole(self.path / "resolved.yaml", text)
        made_with = json.dumps(environment(), indent=2)
        write_whole(self.path / "environment.json", made_with + "\n")

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one report: numbers, and text for whatever is not one."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The reports so far."""
        return read_metrics(self.metrics)

    def forget_metrics_after(self, batches: int) -> None:
        """Drop the reports of batches that a resumed run is going to train again."""
        kept = [line for line in self.read_metrics() if line["batches"] <= batches]
        write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))

    def record_end(self, end: End) -> None:
        """Write how the run ended."""
        write_whole(self.end, json.dumps(dataclasses.asdict(end), indent=2) + "\n")

    def forget_end(self) -> None:
        """The run begins, or goes on."""
        self.end.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a process killed meanwhile leaves the old one or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)


def read_end(folder: Path) -> End | None:
    """How the run in a folder ended; None while it runs, and if it was killed.

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
    """The reports in a `metrics.jsonl`, none without it; a line cut off by a kill ends them."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def fresh_folder(root: Path, name: str) -> Path:
    """Create and return a new folder `root/name/TIME`."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
        path = root / name / (stamp + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{root / name}: a thousand runs in one second")


def environment() -> dict[str, Any]:
    """Versions, device, commit, command and date: what a result was made with."""
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
    """The version of a package that a run can do without; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the code, with `-dirty` if it was changed since; None outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(describe, cwd=Path.cwd(), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
