"""The steps of the command `compare`: short pilots, a plan, the runs, the answer."""

from __future__ import annotations

import copy
import dataclasses
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import determined as det
from rich.console import Console
from rich.status import Status

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Config, Values
from determined_amp.amp.settings import Precision
from determined_amp.experiment.dotted import put
from determined_amp.experiment.experiment import TRIAL_SEED, Experiment, parse
from determined_amp.experiment.files import write_whole
from determined_amp.experiment.overrides import in_precision
from determined_amp.finder.found_scale import (
    FILE_NAME,
    FoundScale,
    scale_sentences,
    yaml_changes,
)
from determined_amp.finder.scale_finding import Verdict
from determined_amp.pilots import (
    BATCHES,
    FINDER_BATCHES,
    REPORTING_PERIOD,
    TOO_SLOW,
    Pilot,
    find_the_scale,
    train_briefly,
)
from determined_amp.report import ReportError
from determined_amp.report.precision_report import (
    PrecisionReport,
    write_precision_report,
)
from determined_amp.report.precision_runs import counted
from determined_amp.runs.folder import fresh_folder, read_record
from determined_amp.runs.run import Run, RunState
from determined_amp.search.optimize import GRACE, INTERRUPTED, run_comparison
from determined_amp.search.search_display import minutes
from determined_amp.search.search_folder import (
    Search,
    read_config,
    read_remarks,
    read_search,
    write_config,
    write_remarks,
)
from determined_amp.search.search_plan import SearchPlan

# Number of reports per run. The first report of a process has no steady speed.
_REPORTS = 8

# Time limit of the runs as a multiple of their estimate, and seconds for the report
# after them.
_RESERVE = 1.3
_REPORT_SECONDS = 10.0

# The answer where there is nothing to compare.
ONLY_FP32 = (
    f"use fp32: every other precision failed or was more than {TOO_SLOW:g}x slower"
)

_FLOAT16_HOPELESS = (Verdict.FORWARD_OVERFLOW, Verdict.BF16)

# Asked at each report of a run whether to stop there.
IsPaused = Callable[[], bool]


class CompareError(UserError):
    """No two precisions can be compared."""


@dataclass(eq=False)
class ComparisonPaused(Exception):  # noqa: N818  # it is no error
    """A comparison was paused."""

    folder: Path | None  # it has the runs so far; None before the first


@dataclass(frozen=True)
class Compared:
    """How a comparison ended."""

    folder: Path
    report: PrecisionReport | None = None  # None if only fp32 could be trained
    is_interrupted: bool = False  # whether a signal stopped it


def compare(
    config: Config,
    source: str,
    options: Namespace,
    is_paused: IsPaused = bool,
) -> Compared:
    """Compare the precisions of a trial, and print which one to use.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for the error message.
        options: `trial`, `seeds`, `batches`, `minutes`.
        is_paused: Asked at each report of a run whether to stop there.

    Raises:
        UserError: if the trial cannot be trained in fp32.
        ComparisonPaused: if it is paused; `go_on` trains the other runs.
    """
    experiment = parse(
        in_precision(config, Precision.FP32.value), source, trial=options.trial
    )
    folder = fresh_folder(Path("runs"), f"compare-{experiment.name}")
    trials = _Trials(experiment, config, options.seeds)
    results = PilotResults()
    try:
        run_pilots(trials, results, folder / "pilots", is_paused)
    finally:  # after Ctrl-C, too
        print_pilots(results)
    if len(results.pilots) < 2:
        print(f"\n{ONLY_FP32} (see above)")
        reasons = "".join(
            f"* {name}: {why}\n" for name, why in results.left_out.items()
        )
        write_whole(folder / "precision.md", f"# {ONLY_FP32}\n\n{reasons}")
        return Compared(folder)
    plan = make_plan(results, experiment, options)
    print_plan(results, plan, options.seeds)
    write_remarks(folder, **results.remarks(), time_limit=plan.time_limit)
    write_config(folder, trials.search(list(results.pilots), plan), workers=1)
    return go_on(folder, is_paused)


def go_on(folder: Path, is_paused: IsPaused) -> Compared:
    """Train the runs of a comparison that have not ended, and print its answer.

    They have the whole time limit. See `compare` for `is_paused` and what it raises.
    """
    cut_short = run_comparison(folder, read_remarks(folder)["time_limit"], is_paused)
    is_interrupted = cut_short == INTERRUPTED
    if is_interrupted and is_paused():
        raise ComparisonPaused(folder)
    return Compared(folder, _report(folder, cut_short), is_interrupted)


def planned_runs(folder: Path) -> int:
    """The number of runs of the comparison in a folder."""
    return len(SearchPlan(read_config(folder)).points)


def ended_runs(source: Search) -> list[Run]:
    """The runs of a comparison that have ended, or failed."""
    return [
        r for r in source.runs if r.state is RunState.COMPLETED or r.state.is_failure
    ]


def _report(folder: Path, cut_short: str) -> PrecisionReport:
    """Write the report on those of the planned runs that have ended, and print its
    answer.

    `cut_short` is what `run_comparison` returned.
    """
    steps = _to_go_on(folder)
    planned = planned_runs(folder)
    ended = _of_answer(read_search(folder), planned, cut_short)
    try:
        report = write_precision_report([ended], folder)
    except ReportError as error:
        if not cut_short:
            raise
        kind = KeyboardInterrupt if cut_short == INTERRUPTED else CompareError
        raise kind(
            "stopped before there was anything to compare: too few runs were finished "
            f"{cut_short}; {steps[0]}"
        ) from error
    if len(ended.runs) < planned:
        more = "".join(f"  {step}\n" for step in steps)
        early = (
            f"not every run was finished {cut_short}: the answer is early. For more:"
        )
        print(f"{early}\n{more}")
    print(f"\n{report.written.text}\n\nthe page with all numbers: {_page(folder)}")
    return report


def _of_answer(source: Search, planned: int, cut_short: str) -> Search:
    """The runs that have ended, by their number, and how many have not, and why.

    The folder of a run says nothing to a reader, and on a cluster it ends with its
    task.
    """
    ended = ended_runs(source)
    missing = planned - len(ended)
    were = "was" if missing == 1 else "were"
    left_out = (
        [f"{missing} of {planned} runs {were} not finished {cut_short}"]
        if missing
        else []
    )
    return dataclasses.replace(
        source,
        runs=tuple(dataclasses.replace(run, name=f"run {run.number}") for run in ended),
        left_out=(*source.left_out, *left_out),
    )


def _page(folder: Path) -> str:
    """Where to find the page."""
    info = det.get_cluster_info()
    if info is None:
        return str(folder / "precision.md")
    return f"python -m determined_amp report {info.trial.experiment_id}"


def _to_go_on(folder: Path) -> list[str]:
    """The commands to type for the missing runs."""
    if det.get_cluster_info() is not None:  # the folder is lost with its task
        longer = "python3 -m determined_amp compare --minutes MORE"
        return [f"det experiment create ... --config entrypoint='{longer}'"]
    commands = ("search --resume", "report")
    return [f"python -m determined_amp {command} {folder}" for command in commands]


@dataclass(frozen=True)
class ComparisonPlan:
    """The planned runs."""

    batches: int  # length of each run, in batches
    reporting_period: int  # interval of its reports, in batches
    seconds: float  # estimated time of all runs
    allowed: float  # seconds that the user allows the runs

    @property
    def time_limit(self) -> float:
        """Seconds after which the runs are stopped."""
        return max(self.seconds * _RESERVE, self.allowed)

    @property
    def announced(self) -> float:
        """Upper limit of the total time, including the report, in seconds."""
        return self.time_limit + GRACE + _REPORT_SECONDS


@dataclass
class PilotResults:
    """The results of the pilots."""

    # The pilot of each precision that can be compared, in the order of their runs.
    pilots: dict[Precision, Pilot] = field(default_factory=dict)
    # why the others cannot, by precision
    left_out: dict[str, str] = field(default_factory=dict)
    scale: FoundScale | None = None  # the finder's answer; None if it has none

    def add(self, pilot: Pilot) -> None:
        """Keep a pilot, or leave its precision out and record why.

        Raises:
            CompareError: if the trial cannot be trained in fp32.
        """
        if pilot.failure is None:
            self.pilots[pilot.precision] = pilot
        elif pilot.precision is Precision.FP32:
            raise CompareError(f"the trial cannot be trained in fp32: {pilot.failure}")
        else:
            self.left_out[pilot.precision.value] = pilot.failure

    def leave_out(self, precision: Precision, why: str) -> None:
        """Leave out a precision whose pilot was trained."""
        del self.pilots[precision]
        self.left_out[precision.value] = why

    def remarks(self) -> dict[str, list[str]]:
        """Sentences for the report: precisions left out, and the loss scale."""
        left_out = [f"{name}: {why}" for name, why in self.left_out.items()]
        answer = [] if self.scale is None else scale_sentences(self.scale)
        return {
            "left_out": left_out,
            "notes": [f"float16 loss scale: {text}" for text in answer],
        }


class _Trials:
    """Makes the configurations of the runs from the experiment.

    Args:
        experiment: The experiment in fp32.
        config: Its configuration before the change to fp32; it may have scaler
            settings.
        seeds: Number of runs of each precision.
    """

    def __init__(self, experiment: Experiment, config: Config, seeds: int) -> None:
        self._experiment = experiment
        self._seeds = [experiment.seed + i for i in range(seeds)]
        section = config.get("hyperparameters", {}).get("amp")
        self._amp = dict(section) if isinstance(section, Mapping) else {}

    def change_amp(self, changes: Config) -> None:
        """Change the section `amp` of all later trials; None removes a key."""
        changed = {**self._amp, **changes}
        self._amp = {key: value for key, value in changed.items() if value is not None}

    def pilot(self, precision: Precision, batches: int) -> Config:
        """The experiment of a pilot in a precision."""
        amp = {**self._amp, "precision": precision.value}
        return self._config(
            {"amp": amp}, self._rounded(batches), self._rounded(REPORTING_PERIOD)
        )

    def search(self, precisions: Sequence[Precision], plan: ComparisonPlan) -> Config:
        """The search over these precisions and all seeds."""
        # A grid begins with its last value: fp32, which the others are compared with.
        names = [precision.value for precision in precisions[::-1]]
        ranges = {
            TRIAL_SEED: {"type": "categorical", "vals": self._seeds},
            "amp": {**self._amp, "precision": {"type": "categorical", "vals": names}},
        }
        config = self._config(ranges, plan.batches, plan.reporting_period)
        config["name"] = f"compare-{self._experiment.name}"
        config["searcher"]["name"] = "grid"
        return config

    def _config(
        self, hyperparameters: Config, batches: int, reporting_period: int
    ) -> Values:
        """The experiment with changed hyperparameters and lengths.

        A run has one validation and one checkpoint, at its end.
        """
        config = copy.deepcopy(dict(self._experiment.config))
        own = config["hyperparameters"] = {
            **config["hyperparameters"],
            **hyperparameters,
        }
        if "trial" in own:
            config["entrypoint"] = "python3 -m determined_amp train"
        searcher = self._experiment.platform.searcher
        config["searcher"] = {
            "name": "single",
            "metric": searcher.metric,
            "smaller_is_better": searcher.smaller_is_better,
        }
        own.get("training", {}).pop("reporting_period", None)  # it may be in epochs
        whole = {"batches": batches}
        lengths: Config = {
            "max_length": whole,
            "validation_period": whole,
            "checkpoint_period": whole,
            "reporting_period.batches": reporting_period,
        }
        for name, length in lengths.items():
            put(config, self._experiment.key_of(name).split("."), length)
        return config

    def _rounded(self, batches: int) -> int:
        window = self._experiment.aggregation_frequency
        return -(-batches // window) * window


def run_pilots(
    trials: _Trials,
    results: PilotResults,
    folder: Path,
    is_paused: IsPaused,
) -> None:
    """Train briefly in every precision that the device supports, and find the loss
    scale.

    Raises:
        CompareError: if the trial cannot be trained in fp32.
        ComparisonPaused: if it is paused.
    """
    console = Console()
    baseline = folder / Precision.FP32.value
    for number, precision in enumerate(Precision, 1):
        what = f"pilot {number} of {len(Precision)}, in {precision.value}"
        if precision is Precision.TF32 and not read_record(baseline).machine.has_tf32:
            print(f"{what}: left out, because it is fp32 on this device", flush=True)
            continue
        # a log has no status line
        print(f"{what}: up to {BATCHES} batches", flush=True)
        with console.status(
            f"{what}: waiting for its first batches, and their audit"
        ) as shown:

            def watch(batches: int, what: str = what, shown: Status = shown) -> None:
                shown.update(f"{what}: {batches} of {BATCHES} batches")
                if is_paused():
                    raise ComparisonPaused(None)

            config = trials.pilot(precision, BATCHES)
            base = results.pilots.get(Precision.FP32)
            pilot = train_briefly(
                config, precision, folder / precision.value, base, watch
            )
            results.add(pilot)
        if precision is Precision.AMP_FP16 and precision in results.pilots:
            print(f"measuring the loss scale of {FINDER_BATCHES} batches", flush=True)
            _find(trials, results, folder)


def _find(trials: _Trials, results: PilotResults, folder: Path) -> None:
    """Find the loss scale, or the reason why float16 has none."""
    config = trials.pilot(Precision.AMP_FP16, FINDER_BATCHES)
    answer = find_the_scale(config, folder / "loss-scale")
    if isinstance(answer, str):
        results.leave_out(Precision.AMP_FP16, answer)
        return
    results.scale = answer
    if answer.finding.verdict in _FLOAT16_HOPELESS:
        cause = answer.finding.cause or "float16 loses gradients at every loss scale"
        results.leave_out(Precision.AMP_FP16, cause)
    else:
        trials.change_amp(yaml_changes(answer))
    (folder.parent / FILE_NAME).write_text(answer.json_text())


def make_plan(
    results: PilotResults, experiment: Experiment, options: Namespace
) -> ComparisonPlan:
    """The runs that fit into the time that the options give."""
    pilots = results.pilots.values()
    per_batch = options.seeds * sum(pilot.seconds_per_batch for pilot in pilots)
    overhead = options.seeds * sum(pilot.overhead for pilot in pilots)
    window = experiment.aggregation_frequency
    allowed = 60.0 * options.minutes
    if options.batches is None:
        wanted = (allowed / _RESERVE - overhead) / per_batch
        own = experiment.training.max_length
        epoch = results.pilots[Precision.FP32].epoch_batches
        if own is not None and (own.batches or epoch):
            wanted = min(wanted, own.in_batches(epoch or 1))  # a schedule may end there
        wanted = max(wanted, BATCHES)  # shorter runs report no speed
    else:
        wanted = options.batches
    period = max(int(wanted) // _REPORTS // window, 1) * window
    batches = options.batches or max(int(wanted) // period, 1) * period
    return ComparisonPlan(batches, period, overhead + batches * per_batch, allowed)


def print_pilots(results: PilotResults) -> None:
    """Print the results of the pilots."""
    print(f"pilots of {BATCHES} batches, which only plan the runs:")
    for precision, pilot in results.pilots.items():
        print(f"  {precision.value:9} {1000 * pilot.seconds_per_batch:8.1f} ms a batch")
    for name, why in results.left_out.items():
        print(f"  {name:9} left out: {why}")


def print_plan(results: PilotResults, plan: ComparisonPlan, seeds: int) -> None:
    """Print what will be run, and the time that it takes."""
    names = ", ".join(precision.value for precision in results.pilots)
    print(
        f"plan: {names} in turn, {counted(seeds, 'run')} of {plan.batches} batches "
        f"each: about {minutes(plan.seconds)}, at most {minutes(plan.announced)}",
        flush=True,
    )
