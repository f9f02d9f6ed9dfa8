"""Trains briefly in each precision, to measure the time of a batch and the loss scale.

A pilot is an ordinary run, but it ends as soon as its batches were timed for long
enough, so a slow machine costs little time. A precision is left out if a batch takes
more than `TOO_SLOW` times as long as in fp32.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from rich.console import Console

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import Precision
from determined_amp.compare.comparable import LEAST_BATCHES
from determined_amp.experiment.entrypoint import Task
from determined_amp.experiment.experiment import Experiment
from determined_amp.finder.found_scale import FILE_NAME
from determined_amp.finder.scale_finding import Verdict
from determined_amp.local.processes import GoesOn
from determined_amp.runs.folder import RunFolder, read_record, read_run
from determined_amp.runs.run import PRECISION, Run, RunState
from determined_amp.search.search_display import minutes
from determined_amp.search.trial_process import Job, TrialProcess

# Reporting period of a pilot, in batches.
REPORTING_PERIOD = 2

# The finder uses at most this many batches, and computes each about `_PASSES` times.
FINDER_BATCHES = 4
_PASSES = 4

# A precision is left out if its batches take more than this many times as long as in
# fp32.
TOO_SLOW = 5.0

# A pilot ends this many seconds after its first report, which covers the warm-up. The
# finder gets about as many seconds.
_LONG = 30.0

_FLOAT16_HOPELESS = (Verdict.FORWARD_OVERFLOW.value, Verdict.BF16.value)


class PilotError(UserError):
    """A precision cannot be compared; the message says why."""


@dataclass(frozen=True)
class Pilot:
    """A short run in one precision."""

    seconds_per_batch: float  # without the first report of the process
    # Seconds for everything else: the start of the process, the data, the audit, and
    # validation and checkpoint if the pilot got that far.
    overhead: float = 0.0
    epoch_batches: int | None = None  # batches of an epoch; None if unknown
    is_cut_short: bool = False  # whether it ended early, after enough time


@dataclass
class PilotResults:
    """The results of the pilots."""

    # The pilot of each precision that can be compared, in the order of their runs.
    pilots: dict[Precision, Pilot] = field(default_factory=dict)
    # For each precision that cannot be compared, the reason.
    left_out: dict[Precision, str] = field(default_factory=dict)
    scale: Values | None = None  # the JSON of the finder; None if it has no answer

    def leave_out(self, precision: Precision, why: str) -> None:
        """Leave out a precision, and record why.

        Raises:
            UserError: if the precision is fp32, which the others are compared with.
        """
        if precision is Precision.FP32:
            raise UserError(f"the trial cannot be trained in fp32: {why}")
        self.pilots.pop(precision, None)
        self.left_out[precision] = why

    def add(self, precision: Precision, pilot: Pilot) -> None:
        """Keep the pilot of a precision.

        Raises:
            PilotError: if the pilot is too slow.
        """
        if self.times_as_long(pilot) > TOO_SLOW:
            raise PilotError(
                f"for time: a batch takes {self.times_as_long(pilot):.0f} times as "
                f"long as in fp32 (`det-amp train YAML --precision {precision.value}` "
                "trains in it all the same)"
            )
        self.pilots[precision] = pilot

    def times_as_long(self, pilot: Pilot) -> float:
        """The time of a batch, relative to fp32; 1 for the pilot in fp32."""
        base = self.pilots.get(Precision.FP32, pilot)
        return pilot.seconds_per_batch / base.seconds_per_batch

    @property
    def reasons(self) -> list[str]:
        """A sentence for each precision that is left out."""
        return [f"{precision.value}: {why}" for precision, why in self.left_out.items()]

    @property
    def notes(self) -> list[str]:
        """What the finder says, for the report."""
        said = self.scale["sentences"] if self.scale else ()
        return [f"float16 loss scale: {text}" for text in said]

    def __str__(self) -> str:
        lines = [f"pilots of up to {LEAST_BATCHES} batches, which only plan the runs:"]
        for precision, pilot in self.pilots.items():
            milliseconds = 1000 * pilot.seconds_per_batch
            lines.append(f"  {precision.value:9} {milliseconds:8.1f} ms a batch")
        for precision, why in self.left_out.items():
            lines.append(f"  {precision.value:9} left out: {why}")
        return "\n".join(lines)


def lengths_of(experiment: Experiment, batches: int, period: int) -> list[str]:
    """The changes that give a run one validation and one checkpoint, at its end.

    Args:
        experiment: The experiment.
        batches: Length of the run, rounded up to whole optimizer steps.
        period: Its reporting period in batches, rounded up likewise.
    """
    window = experiment.aggregation_frequency
    whole = -(-batches // window) * window
    names = ("max_length", "validation_period", "checkpoint_period")
    lengths = [f"{experiment.key_of(name)}.batches={whole}" for name in names]
    often = -(-period // window) * window
    return [*lengths, f"{experiment.key_of('reporting_period.batches')}={often}"]


def pilot_of(experiment: Experiment, precision: Precision, batches: int) -> Experiment:
    """The experiment of a pilot."""
    lengths = lengths_of(experiment, batches, REPORTING_PERIOD)
    return experiment.variant([*lengths, f"{PRECISION}={precision.value}"])


def run_pilots(
    experiment: Experiment,
    precisions: Sequence[Precision],
    results: PilotResults,
    folder: Path,
) -> None:
    """Train briefly in these precisions, and find the loss scale of float16.

    The first precision must be fp32.

    Raises:
        UserError: if the trial cannot be trained in fp32.
    """
    baseline = folder / Precision.FP32.value
    for number, precision in enumerate(precisions, 1):
        what = f"pilot {number} of {len(precisions)}, in {precision.value}"
        if precision is Precision.TF32 and not read_record(baseline).machine.has_tf32:
            print(f"{what}: left out, because it is fp32 on this device", flush=True)
            continue
        made = pilot_of(experiment, precision, LEAST_BATCHES)
        try:
            pilot = train_pilot(made, folder / precision.value, what)
            results.add(precision, pilot)
            if precision is Precision.AMP_FP16:
                _find(experiment, results, folder)
        except PilotError as error:
            results.leave_out(precision, str(error))


def train_pilot(experiment: Experiment, folder: Path, what: str) -> Pilot:
    """Train a pilot, and show how far it is.

    Args:
        experiment: Its experiment.
        folder: The run folder to make.
        what: Its name, to be shown.

    Raises:
        PilotError: if the pilot fails, or its speed is unknown.
    """
    # A log shows no status line.
    print(f"{what}: up to {LEAST_BATCHES} batches", flush=True)
    began = time.monotonic()
    epoch_batches = None
    reports: list[tuple[float, int]] = []  # the time and the batch of each report
    status = Console().status(
        f"{what}: 0 of {LEAST_BATCHES} batches, the first is audited"
    )

    def goes_on(report: Values) -> bool:
        """Note a report, and return whether the pilot needs more time."""
        nonlocal epoch_batches
        epoch_batches = report.get("epoch_batches", epoch_batches)
        if report["group"] != "training":
            return True
        reports.append((time.monotonic(), report["batches"]))
        left = _LONG - (reports[-1][0] - reports[0][0])
        done = f"{report['batches']} of {LEAST_BATCHES} batches"
        status.update(f"{what}: {done}, at most {minutes(max(left, 0.0))} more")
        return left > 0.0

    with status:
        ended = _run(Job(Task("train"), experiment, RunFolder(folder)), goes_on)
    wall = time.monotonic() - began
    # A pilot is never continued.
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if ended.state not in (RunState.COMPLETED, RunState.PRUNED):
        raise PilotError(ended.reason)
    seconds = _seconds_per_batch(experiment, folder, reports)
    overhead = max(wall - reports[-1][1] * seconds, 0.0)
    return Pilot(seconds, overhead, epoch_batches, ended.state is RunState.PRUNED)


def _seconds_per_batch(
    experiment: Experiment, folder: Path, reports: Sequence[tuple[float, int]]
) -> float:
    """The time of a batch: by the reported speed, which excludes the time of the
    reports, or else by the time between reports.
    """
    if speed := read_run(folder).speed:
        return (experiment.global_batch_size or 0) / speed.median
    times = [
        (ended - began) / (last - first)
        for (began, first), (ended, last) in pairwise(reports)
    ]
    if not times:
        raise PilotError("its reports tell no speed")
    return median(times)


def _find(experiment: Experiment, results: PilotResults, folder: Path) -> None:
    """Find the loss scale.

    Raises:
        PilotError: if the finder fails, or no loss scale suits float16.
    """
    seconds = results.pilots[Precision.AMP_FP16].seconds_per_batch
    batches = int(min(max(_LONG / (_PASSES * seconds), 1), FINDER_BATCHES))
    print(f"measuring the loss scale of {batches} batches", flush=True)
    made = pilot_of(experiment, Precision.AMP_FP16, batches)
    place = folder / "loss-scale"
    job = Job(Task("find", batches), made, RunFolder(place))
    ended = _run(job, lambda report: True)
    if ended.state is not RunState.COMPLETED:
        raise PilotError(ended.reason)
    text = (place / FILE_NAME).read_text()
    (folder.parent / FILE_NAME).write_text(text)
    results.scale = answer = json.loads(text)
    if answer["verdict"] in _FLOAT16_HOPELESS:
        cause = answer["cause"] or "float16 loses gradients at every loss scale"
        raise PilotError(cause)


def _run(job: Job, goes_on: GoesOn) -> Run:
    """Run a job in a process of its own, and answer its reports by `goes_on`."""
    job.folder.describe_trial(0, {})
    return TrialProcess(job).run(goes_on)
