"""Small searches for the tests: a tiny MLP, scored or trained on a few batches."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from unittest.mock import Mock

import pytest

from determined_amp import __main__ as door
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.runs.run import RunState
from determined_amp.search.search_folder import read_search
from determined_amp.search.trial_process import TrialProcess
from tests.run_here import ROOT, write_yaml

# Python 3.12 warns of threads, of which the fork has none.
FORKS = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
SMALL_MODEL = (
    "data.image_size=8",
    "hyperparameters.hidden_features=16",
    "hyperparameters.global_batch_size=32",
)
THREE_SCALES = (
    "hyperparameters.amp.init_scale={type: log, base: 2.0, minval: 4, maxval: 24, "
    "count: 3}",
    "entrypoint=python3 -m determined_amp score --batches 2",
)
TWO_SCALES = (THREE_SCALES[0].replace("count: 3", "count: 2"), THREE_SCALES[1])
# Trains 8 batches.
SHORT = (
    "hyperparameters.training={max_length: {batches: 8}, validation_period: {batches: "
    "2}, checkpoint_period: {batches: 2}, reporting_period: {batches: 2}}",
)
# The 4 trials are compared after 2 batches.
SHORT_ASHA = ("searcher.max_trials=4", "searcher.max_time=8", *SHORT)


def load(search, *overrides):
    """A search of the repository, changed, over a small model."""
    config = read_yaml(str(ROOT / "hp_search" / search))
    return with_overrides(config, (*SMALL_MODEL, *overrides))


def write(directory, search, *overrides):
    """The path of its YAML in a folder."""
    return write_yaml(directory, load(search, *overrides))


def only_folder(directory):
    """The folder of the one search that was run in `directory`."""
    (folder,) = directory.glob("runs/*/*")
    return folder


def run(directory, search, *overrides, workers=1, status=0):
    """Search in this process and its workers; the current directory has to be
    `directory`.
    """
    path = write(directory, search, *overrides)
    assert door.run(["search", path, "--workers", str(workers)]) == status
    return read_search(only_folder(directory))


class Ended(NamedTuple):
    """How a staged trial ends, by the record in its folder."""

    state: RunState = RunState.COMPLETED
    reason: str = ""


DEAD = Ended(RunState.RUNNING)  # its process dies
COMPLETED = (Ended(),)


class Reports:
    """The connection to a staged trial.

    A pipe, for `multiprocessing.connection.wait`, has a byte for each report.

    Attributes:
        answers: What the trial was told after each of its reports.
    """

    def __init__(self, reports):
        self._reports = [*reports]
        self.answers = []
        self._reader, self._writer = os.pipe()
        os.write(self._writer, bytes(len(self._reports)))
        self._has_ended = self.closed = False

    def fileno(self):
        return self._reader

    def end(self):
        """The process has ended."""
        if not self._has_ended:
            self._has_ended = True
            os.close(self._writer)

    def recv(self):
        if not os.read(self._reader, 1):
            raise EOFError
        return self._reports.pop(0)

    def send(self, answer):
        self.answers.append(answer)

    def close(self):
        self.closed = True
        self.end()
        os.close(self._reader)


class Staged(TrialProcess):
    """A trial without a process: it makes reports, and ends, or waits until it is
    stopped.

    Attributes:
        made: All trials, in the order of their start.
        scripts: The reports of the next ones and their `Ended`, one after the other.
        jobs: What they were told to do.
        script: That of each without one in `scripts`.
        stopped_by: What ends it: `terminate` or `kill`.
    """

    made: ClassVar[list[Staged]] = []
    jobs: ClassVar[list[Any]] = []
    script: ClassVar[Sequence[object]] = ()
    scripts: ClassVar[list[Sequence[object]]] = []
    stopped_by = "terminate"

    def __init__(self, job, slot=0, workers=1):
        self.slot = slot
        self._folder = job.folder
        script = self.scripts.pop(0) if self.scripts else self.script
        self.connection: Any = Reports(
            each for each in script if not isinstance(each, Ended)
        )
        self.process: Any = Mock(exitcode=-signal.SIGTERM)
        getattr(self.process, self.stopped_by).side_effect = self.connection.end
        self.made.append(self)
        self.jobs.append(job)
        for end in script:
            if isinstance(end, Ended):
                job.folder.end(*end)
                self.connection.end()


def stage(monkeypatch, module):
    """Let the module start staged trials instead of processes."""
    monkeypatch.setattr(module, "TrialProcess", Staged)
    for name in ("made", "jobs"):
        monkeypatch.setattr(Staged, name, [])
