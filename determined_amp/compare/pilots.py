"""Short runs of a trial in each precision, for the time of a batch and the loss scale.

A pilot is an ordinary run with one rule of its own: a precision is left out if a batch
takes more than `TOO_SLOW` times as long as in fp32. It ends as soon as its batches were
timed long enough, so that a slow machine is not waited for.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.status import Status

from determined_amp.amp.errors import UserError
from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import Precision
from determined_amp.experiment.experiment import Experiment
from determined_amp.finder.found_scale import FILE_NAME, FoundScale
from determined_amp.finder.scale_finding import Verdict
from determined_amp.local.trainer import GoesOn
from determined_amp.runs.folder import RunFolder, read_record
from determined_amp.runs.run import Run, RunState
from determined_amp.search.search_display import minutes
from determined_amp.search.task import Task, Verb
from determined_amp.search.trial_process import Job, TrialProcess

# Length and reporting period in batches. The first ten batches of a process report no
# speed.
BATCHES = 20
REPORTING_PERIOD = 2

# How many batches the finder uses, and about how many times it computes each.
FINDER_BATCHES = 4
_PASSES = 4

# A precision is left out if its batches take more than this many times as long as in
# fp32.
TOO_SLOW = 5.0

# How many times between reports are needed to judge: one may be a hiccup.
_ENOUGH = 2

# Seconds after which the batches of a pilot are timed long enough, and after which its
# state is printed again.
_LONG = 30.0

_FLOAT16_HOPELESS = (Verdict.FORWARD_OVERFLOW, Verdict.BF16)


class CompareError(UserError):
    """No two precisions can be compared."""


# The experiment of a pilot in a precision, with this length in batches.
PilotOf = Callable[[Precision, int], Experiment]


@dataclass(frozen=True)
class Pilot:
    """A short run in one precision."""

    seconds_per_batch: float  # without the first report of the process
    # Seconds for everything else: the start of the process, the data, the audit, and
    # validation and checkpoint if the pilot came so far.
    overhead: float = 0.0
    epoch_batches: int | None = None  # batches of an epoch; None if it is not known
    is_cut_short: bool = False  # whether it was timed long enough before its end


@dataclass
class PilotResults:
    """The results of the pilots."""

    # The pilot of each precision that can be compared, in the order of their runs.
    pilots: dict[Precision, Pilot] = field(default_factory=dict)
    # Why the others cannot, by precision.
    left_out: dict[Precision, str] = field(default_factory=dict)
    scale: FoundScale | None = None  # the finder's answer; None if it has none

    def leave_out(self, precision: Precision, why: str) -> None:
        """Leave out a precision, and record why.

        Raises:
            CompareError: if it is fp32, which the others are compared with.
        """
        if precision is Precision.FP32:
            raise CompareError(f"the trial cannot be trained in fp32: {why}")
        self.pilots.pop(precision, None)
        self.left_out[precision] = why

    def judge(
        self,
        precision: Precision,
        times: BatchTimes,
        overhead: float,
        *,
        is_cut_short: bool,
    ) -> None:
        """Keep the times of a pilot that ended, or leave its precision out."""
        seconds = times.seconds_per_batch
        if not seconds:
            self.leave_out(precision, "its reports tell no speed")
        elif seconds > self.slowest:
            factor = TOO_SLOW * seconds / self.slowest
            self.leave_out(
                precision,
                f"for time: a batch takes {factor:.0f} times as long as in fp32 "
                f"(`det-amp train YAML --precision {precision.value}` trains in it all "
                "the same)",
            )
        else:
            epoch = times.epoch_batches
            self.pilots[precision] = Pilot(seconds, overhead, epoch, is_cut_short)

    @property
    def slowest(self) -> float:
        """Seconds of a batch that are too many; infinite before the pilot in fp32."""
        base = self.pilots.get(Precision.FP32)
        return TOO_SLOW * base.seconds_per_batch if base else math.inf

    @property
    def reasons(self) -> list[str]:
        """A sentence for each precision that is left out."""
        return [f"{precision.value}: {why}" for precision, why in self.left_out.items()]

    def __str__(self) -> str:
        lines = [f"pilots of up to {BATCHES} batches, which only plan the runs:"]
        for precision, pilot in self.pilots.items():
            milliseconds = 1000 * pilot.seconds_per_batch
            lines.append(f"  {precision.value:9} {milliseconds:8.1f} ms a batch")
        for precision, why in self.left_out.items():
            lines.append(f"  {precision.value:9} left out: {why}")
        return "\n".join(lines)


class BatchTimes:
    """The times of a pilot's batches, by its reports; the first one is left out.

    The speed that a run reports is used where there is one: it does not include the
    time of the report.

    Args:
        batch_size: Samples in a batch.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._last_report = 0.0
        self._between_reports: list[float] = []
        self._reported: list[float] = []
        self.timed = 0.0  # seconds between the first report and the last
        self.batches = 0
        self.epoch_batches: int | None = None

    def add(self, report: Values) -> None:
        self.epoch_batches = report.get("epoch_batches", self.epoch_batches)
        if report["group"] != "training":
            return
        now = time.monotonic()
        batches = report["batches"]
        if self.batches:
            seconds = now - self._last_report
            self.timed += seconds
            self._between_reports.append(seconds / (batches - self.batches))
        self._last_report = now
        self.batches = batches
        if speed := report.get(MetricName.SAMPLES_PER_SECOND):
            self._reported.append(self._batch_size / speed)

    @property
    def are_enough(self) -> bool:
        return len(self._between_reports) >= _ENOUGH

    @property
    def seconds_per_batch(self) -> float:
        """The median; 0 if no report tells."""
        times = self._reported or self._between_reports
        return median(times) if times else 0.0


class PilotDisplay:
    """Says how far a pilot is: in the status line, and every 30 s in the log.

    Args:
        what: The pilot.
        status: The status line.
        console: For the log.
    """

    def __init__(self, what: str, status: Status, console: Console) -> None:
        self._what = what
        self._status = status
        self._console = console
        self._shown = time.monotonic()

    def show(self, times: BatchTimes) -> None:
        text = f"{self._what}: {times.batches} of {BATCHES} batches"
        if seconds := times.seconds_per_batch:
            rest = (BATCHES - times.batches) * seconds
            rest = min(rest, max(_LONG - times.timed, 0.0))
            text = f"{text}, about {minutes(rest)} more"
        self._status.update(text)
        if time.monotonic() - self._shown > _LONG:
            self._shown = time.monotonic()
            self._console.print(text)


def run_pilots(
    pilot_of: PilotOf,
    precisions: Sequence[Precision],
    results: PilotResults,
    folder: Path,
) -> None:
    """Train briefly in these precisions, fp32 first; find the loss scale of float16.

    Raises:
        CompareError: if the trial cannot be trained in fp32.
    """
    console = Console()
    baseline = folder / Precision.FP32.value
    for number, precision in enumerate(precisions, 1):
        what = f"pilot {number} of {len(precisions)}, in {precision.value}"
        if precision is Precision.TF32 and not read_record(baseline).machine.has_tf32:
            print(f"{what}: left out, because it is fp32 on this device", flush=True)
            continue
        # A log has no status line.
        print(f"{what}: up to {BATCHES} batches", flush=True)
        waiting = f"{what}: waiting for its first batches, and their audit"
        with console.status(waiting) as status:
            display = PilotDisplay(what, status, console)
            pilot = pilot_of(precision, BATCHES)
            place = folder / precision.value
            train_pilot(pilot, precision, place, results, display.show)
        if precision is Precision.AMP_FP16 and precision in results.pilots:
            _find(pilot_of, results, folder)


def train_pilot(
    experiment: Experiment,
    precision: Precision,
    folder: Path,
    results: PilotResults,
    watch: Callable[[BatchTimes], None],
) -> None:
    """Train a pilot, and keep its times, or the reason to leave its precision out.

    Args:
        experiment: The experiment in this precision, with `REPORTING_PERIOD`.
        precision: The precision.
        folder: The run folder to make.
        results: Of the pilots before it; gets that of this one.
        watch: Called at each report; an error ends the pilot.
    """
    times = BatchTimes(experiment.global_batch_size or 0)
    slowest = results.slowest

    def goes_on(report: Values) -> bool:
        times.add(report)
        watch(times)
        is_known = times.timed > _LONG or times.seconds_per_batch > slowest
        return not (times.are_enough and is_known)

    began = time.monotonic()
    ended = _run(Job(Task(Verb.TRAIN), experiment, RunFolder(folder)), goes_on)
    wall = time.monotonic() - began
    # A pilot is never continued.
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    if ended.state in (RunState.COMPLETED, RunState.PRUNED):
        overhead = max(wall - times.batches * times.seconds_per_batch, 0.0)
        is_cut_short = ended.state is RunState.PRUNED
        results.judge(precision, times, overhead, is_cut_short=is_cut_short)
    else:
        results.leave_out(precision, ended.reason)


def _find(pilot_of: PilotOf, results: PilotResults, folder: Path) -> None:
    """Find the loss scale, or the reason why float16 has none."""
    seconds = results.pilots[Precision.AMP_FP16].seconds_per_batch
    batches = int(min(max(_LONG / (_PASSES * seconds), 1), FINDER_BATCHES))
    print(f"measuring the loss scale of {batches} batches", flush=True)
    experiment = pilot_of(Precision.AMP_FP16, batches)
    task = Task(Verb.FIND, batches=batches)
    place = folder / "loss-scale"
    ended = _run(Job(task, experiment, RunFolder(place)), lambda report: True)
    if ended.state is not RunState.COMPLETED:
        results.leave_out(Precision.AMP_FP16, ended.reason)
        return
    results.scale = answer = FoundScale.read(place / FILE_NAME)
    if answer.finding.verdict in _FLOAT16_HOPELESS:
        cause = answer.finding.cause or "float16 loses gradients at every loss scale"
        results.leave_out(Precision.AMP_FP16, cause)
    (folder.parent / FILE_NAME).write_text(answer.json_text())


def _run(job: Job, goes_on: GoesOn) -> Run:
    """Run a job in a process of its own, as long as it goes on."""
    job.folder.describe_trial(0, {})
    process = TrialProcess(job)
    try:
        process.answer(goes_on)
    except BaseException:
        process.end(kill=True)
        raise
    return process.end()
