"""Short pilots of a trial, each in its own process, for the batch time and the loss
scale.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from determined_amp.amp.plain_data import Config, Values
from determined_amp.amp.settings import Precision
from determined_amp.finder.found_scale import FILE_NAME, FoundScale
from determined_amp.local.trainer import GoesOn
from determined_amp.runs.folder import RunFolder
from determined_amp.runs.run import Run, RunState
from determined_amp.search.task import Task, Verb
from determined_amp.search.trial_process import Job, TrialProcess

# Length and reporting period in batches. The first ten batches of a process are not
# timed.
BATCHES = 20
REPORTING_PERIOD = 2

# How many batches the finder uses.
FINDER_BATCHES = 4

# A precision is left out if its batches take more than this many times as long as in
# fp32.
TOO_SLOW = 5.0

# How many times between reports are needed to stop a slow pilot: one may be a hiccup.
_ENOUGH = 2

# Told how many batches are trained, at each report; an error ends the pilot.
Watch = Callable[[int], None]


@dataclass(frozen=True)
class Pilot:
    """A short training in one precision."""

    precision: Precision
    seconds_per_batch: float = (
        0.0  # time of a batch, excluding the first batches of the process
    )
    # The same between those two reports where it was shortest, the reports included.
    shortest: float = 0.0
    # Seconds for everything else: the start of the process, the data, the audit, one
    # validation, one checkpoint.
    overhead: float = 0.0
    epoch_batches: int | None = None  # batches of an epoch; None if it is not known
    # Why it cannot be trained; the times then mean nothing. None if it can.
    failure: str | None = None


class _Progress:
    """Times the batches of a pilot by its reports, and stops one that is much slower
    than fp32.

    What the first report took is left out: data, compilation, the audit. A precision is
    judged by its shortest time, so that a busy machine excludes none.

    Args:
        base: The pilot in fp32; None for that one.
        batch_size: Samples in a batch.
        watch: Called at each report.
    """

    def __init__(self, base: Pilot | None, batch_size: int, watch: Watch) -> None:
        self._base = base
        self._batch_size = batch_size
        self._watch = watch
        self._last_report = 0.0
        self._between_reports: list[float] = []
        self._steady: list[float] = []
        self.batches = 0
        self.epoch_batches: int | None = None

    def goes_on(self, report: Values) -> bool:
        """Whether the pilot goes on after this report."""
        self.epoch_batches = report.get("epoch_batches", self.epoch_batches)
        if report["group"] != "training":
            return True
        now = time.monotonic()
        batches = report["batches"]
        if self.batches:
            seconds = now - self._last_report
            self._between_reports.append(seconds / (batches - self.batches))
        self._last_report = now
        self.batches = batches
        if speed := report.get("samples_per_second"):
            self._steady.append(self._batch_size / speed)
        self._watch(batches)
        return len(self._between_reports) < _ENOUGH or self.times_of_fp32 <= TOO_SLOW

    @property
    def shortest(self) -> float:
        """Seconds of a batch, as `Pilot.shortest`; 0 if no report tells."""
        return min(self._between_reports or self._steady, default=0.0)

    @property
    def times_of_fp32(self) -> float:
        """How many times as long as in fp32 a batch takes."""
        return self.shortest / self._base.shortest if self._base is not None else 1.0

    @property
    def seconds_per_batch(self) -> float:
        """As in `Pilot`; 0 if no report tells."""
        return median(self._steady) if self._steady else self.shortest


def train_briefly(
    config: Config,
    precision: Precision,
    folder: Path,
    base: Pilot | None,
    watch: Watch,
) -> Pilot:
    """Train `BATCHES` batches, or a few if they take much longer than in fp32.

    Args:
        config: The experiment in this precision, with this length and
            `REPORTING_PERIOD`.
        precision: The precision.
        folder: The run folder to make.
        base: The pilot in fp32; None for that one.
        watch: Called at each report.
    """
    began = time.monotonic()
    progress = _Progress(
        base, int(config["hyperparameters"]["global_batch_size"]), watch
    )
    ended = _run(Job(Task(Verb.TRAIN), config, RunFolder(folder)), progress.goes_on)
    wall = time.monotonic() - began
    # a pilot is never continued
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if progress.times_of_fp32 > TOO_SLOW:
        failure = (
            f"for time: a batch takes {progress.times_of_fp32:.0f} times as long as in "
            "fp32 (`python -m determined_amp train YAML --precision "
            f"{precision.value}` trains in it all the same)"
        )
        return Pilot(precision, failure=failure)
    if ended.state is not RunState.COMPLETED:
        return Pilot(precision, failure=ended.reason)
    seconds = progress.seconds_per_batch
    if not seconds:
        return Pilot(precision, failure="its reports tell no speed")
    overhead = max(wall - progress.batches * seconds, 0.0)
    return Pilot(
        precision, seconds, progress.shortest, overhead, progress.epoch_batches
    )


def find_the_scale(config: Config, folder: Path) -> FoundScale | str:
    """The initial loss scale of an experiment in `amp_fp16`, or why none can be found.

    See `train_briefly` for the arguments.
    """
    task = Task(Verb.FIND, batches=FINDER_BATCHES)
    ended = _run(Job(task, config, RunFolder(folder)), lambda report: True)
    if ended.state is RunState.COMPLETED:
        return FoundScale.read(folder / FILE_NAME)
    return ended.reason


def _run(job: Job, goes_on: GoesOn) -> Run:
    """Run a job in a process of its own, as long as it goes on; no clock ends it."""
    job.folder.describe_trial(0, {})
    process = TrialProcess(job)
    try:
        process.answer(goes_on)
    except BaseException:
        process.end(kill=True)
        raise
    return process.end()
