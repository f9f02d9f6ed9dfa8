"""Small searches for the tests: a tiny MLP, scored or trained on a few batches."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import yaml

from determined_amp.cli import search as command
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.search.search_folder import Search, read_search
from determined_amp.search.trial_process import TrialProcess
from tests.training import ROOT

SMALL_MODEL = (
    "data.image_size=8",
    "hyperparameters.hidden_features=16",
    "hyperparameters.global_batch_size=32",
)
THREE_SCALES = (
    "hyperparameters.amp.init_scale={type: log, base: 2.0, minval: 4, maxval: 24, count: 3}",
    "entrypoint=python3 -m determined_amp score --batches 2",
)
TWO_SCALES = (THREE_SCALES[0].replace("count: 3", "count: 2"), THREE_SCALES[1])
# Trains 8 batches.
SHORT = (
    "hyperparameters.training={max_length: {batches: 8}, validation_period: {batches: 2}, "
    "checkpoint_period: {batches: 2}, reporting_period: {batches: 2}}",
)
# The 4 trials are compared after 2 batches.
SHORT_ASHA = ("searcher.max_trials=4", "searcher.max_time=8", *SHORT)


def write(directory: Path, search: str, *overrides: str) -> Path:
    """A search YAML of the repository, changed, over a small model."""
    config = with_overrides(read_yaml(str(ROOT / "hp_search" / search)), (*SMALL_MODEL, *overrides))
    path = directory / "search.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def load(directory: Path, search: str, *overrides: str) -> dict[str, Any]:
    """The configuration that `write` writes."""
    content = yaml.safe_load(write(directory, search, *overrides).read_text())
    assert isinstance(content, dict)
    return content


def only_folder(directory: Path) -> Path:
    """The folder of the one search that was run in `directory`."""
    (folder,) = directory.glob("runs/*/*")
    return folder


def run(directory: Path, search: str, *overrides: str, workers: int = 1, status: int = 0) -> Search:
    """Search in this process and its workers; the current directory has to be `directory`."""
    path = write(directory, search, *overrides)
    assert command.main([path.name, "--workers", str(workers)]) == status
    return read_search(only_folder(directory))


DEAD = "its process dies"


class Staged(TrialProcess):
    """A trial without a process: it only sends messages.

    Attributes:
        made: All trials, in the order of their start.
        scripts: What the next ones send, one after the other.
        jobs: What they were told to do.
        messages: What each sends without a script.
        ending: What ends it: `terminate` or `kill`.
    """

    made: ClassVar[list[Staged]] = []
    jobs: ClassVar[list[Any]] = []
    messages: ClassVar[Sequence[object]] = ()
    scripts: ClassVar[list[Sequence[object]]] = []
    ending = "terminate"

    def __init__(self, job: Any, slot: int = 0, workers: int = 1) -> None:
        self.slot = slot
        self.connection, self.theirs = multiprocessing.Pipe()
        self.process: Any = Mock(exitcode=-signal.SIGTERM)
        getattr(self.process, self.ending).side_effect = self.theirs.close
        self.made.append(self)
        self.jobs.append(job)
        for message in self.scripts.pop(0) if self.scripts else self.messages:
            self.theirs.close() if message is DEAD else self.theirs.send(message)
