"""The steps of the command `compare`: short pilots, a plan, the runs, the answer."""

from __future__ import annotations

import copy
import dataclasses
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import determined as det

from determined_amp.amp.plain_data import Config, Values
from determined_amp.amp.settings import Precision
from determined_amp.compare.pilots import (
    BATCHES,
    REPORTING_PERIOD,
    TOO_SLOW,
    CompareError,
    PilotResults,
    run_pilots,
)
from determined_amp.compare.plan import ComparisonPlan, plan_lines, plan_of
from determined_amp.experiment.dotted import put
from determined_amp.experiment.experiment import (
    TRIAL_SEED,
    Experiment,
    experiment_in,
    parse,
)
from determined_amp.experiment.files import write_whole
from determined_amp.experiment.overrides import in_precision
from determined_amp.finder.found_scale import scale_sentences, yaml_changes
from determined_amp.report import ReportError
from determined_amp.report.precision_report import (
    PrecisionReport,
    write_precision_report,
)
from determined_amp.runs.folder import fresh_folder
from determined_amp.runs.run import Run, RunState
from determined_amp.search.optimize import INTERRUPTED, run_comparison
from determined_amp.search.search_folder import (
    Search,
    read_config,
    read_remarks,
    read_search,
    write_config,
    write_remarks,
)
from determined_amp.search.search_plan import SearchPlan

# The answer where there is nothing to compare.
ONLY_FP32 = (
    f"use fp32: every other precision failed or was more than {TOO_SLOW:g}x slower"
)


# Asked at each report of a run whether to stop there.
IsPaused = Callable[[], bool]


@dataclass(eq=False)
class ComparisonPaused(Exception):  # noqa: N818  # it is no error
    """A comparison was paused."""

    folder: Path  # it has the runs so far


@dataclass(frozen=True)
class ComparisonEnd:
    """How a comparison ended."""

    folder: Path
    report: PrecisionReport | None = None  # None if only fp32 could be trained
    is_interrupted: bool = False  # whether a signal stopped it


def compare(
    config: Config,
    source: str,
    options: Namespace,
    is_paused: IsPaused = bool,
) -> ComparisonEnd:
    """Compare the precisions of a trial, and print which one to use.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for the error message.
        options: `trial`, `precisions`, `seeds`, `batches`, `minutes`.
        is_paused: Asked at each report of a run whether to stop there.

    Raises:
        UserError: if the trial cannot be trained in fp32.
        ComparisonPaused: if it is paused; `go_on` trains the other runs.
    """
    in_fp32 = in_precision(config, Precision.FP32.value)
    experiment = parse(in_fp32, source, trial=options.trial)
    configs = RunConfigs(experiment, own_amp(config), options.seeds)
    # A search is checked more strictly than a run: its mistakes come before pilots.
    shortest = ComparisonPlan(configs.rounded(BATCHES), configs.rounded(1))
    SearchPlan(configs.search(options.precisions, shortest), source)
    folder = fresh_folder(Path("runs"), f"compare-{experiment.name}")
    results = PilotResults()
    pilots = folder / "pilots"
    try:
        run_pilots(configs.pilot, options.precisions, results, pilots)
    finally:  # after Ctrl-C, too
        print(results)
    if len(results.pilots) < 2:
        return _only_fp32(folder, results)
    plan = plan_of(results, experiment, options)
    print("\n".join(plan_lines(results, plan)), flush=True)
    notes: list[str] = []
    if results.scale is not None:
        sentences = scale_sentences(results.scale)
        notes = [f"float16 loss scale: {text}" for text in sentences]
        if Precision.AMP_FP16 in results.pilots:
            configs = configs.with_amp(yaml_changes(results.scale))
    write_remarks(folder, results.reasons, notes, time_limit=plan.time_limit)
    search = configs.search(list(results.pilots), plan)
    return go_on(folder, write_config(folder, search, workers=1), is_paused)


def _only_fp32(folder: Path, results: PilotResults) -> ComparisonEnd:
    """Print and write that there is nothing to compare."""
    print(f"\n{ONLY_FP32} (see above)")
    reasons = "".join(f"* {reason}\n" for reason in results.reasons)
    write_whole(folder / "precision.md", f"# {ONLY_FP32}\n\n{reasons}")
    return ComparisonEnd(folder)


def go_on(folder: Path, config: Config, is_paused: IsPaused) -> ComparisonEnd:
    """Train the runs of a comparison that have not ended, and print its answer.

    They have the whole time limit. See `compare` for `is_paused` and what it raises.
    """
    search, time_limit = SearchPlan(config), read_remarks(folder)["time_limit"]
    cut_short = run_comparison(folder, search, time_limit, is_paused)
    is_interrupted = cut_short == INTERRUPTED
    if is_interrupted and is_paused():
        raise ComparisonPaused(folder)
    return ComparisonEnd(folder, _report(folder, search, cut_short), is_interrupted)


def planned_runs(folder: Path) -> int:
    """The number of runs of the comparison in a folder."""
    return len(SearchPlan(read_config(folder)).points)


def ended_runs(source: Search) -> list[Run]:
    """The runs of a comparison that have ended, or failed."""
    return [
        r for r in source.runs if r.state is RunState.COMPLETED or r.state.is_failure
    ]


def _report(folder: Path, search: SearchPlan, cut_short: str) -> PrecisionReport:
    """Write the report on those runs that have ended, and print its answer.

    `cut_short` is what `run_comparison` returned.
    """
    steps = _to_go_on(folder)
    planned = len(search.points)
    ended = of_answer(read_search(folder, search.search), planned, cut_short)
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


def of_answer(source: Search, planned: int, cut_short: str) -> Search:
    """The runs that have ended, by their number, and how many have not, and why.

    The folder of a run says nothing to a reader, and on a cluster it ends with its
    task.
    """
    ended = ended_runs(source)
    missing = planned - len(ended)
    were = "was" if missing == 1 else "were"
    left_out = list(source.left_out)
    if missing:
        left_out.append(f"{missing} of {planned} runs {were} not finished {cut_short}")
    runs = tuple(dataclasses.replace(run, name=f"run {run.number}") for run in ended)
    return dataclasses.replace(source, runs=runs, left_out=tuple(left_out))


def _page(folder: Path) -> str:
    """Where to find the page."""
    info = det.get_cluster_info()
    if info is None:
        return str(folder / "precision.md")
    return f"det-amp report {info.trial.experiment_id}"


def _to_go_on(folder: Path) -> list[str]:
    """The commands to type for the missing runs."""
    if det.get_cluster_info() is not None:  # the folder is lost with its task
        longer = "python3 -m determined_amp compare --minutes MORE"
        return [f"det experiment create ... --config entrypoint='{longer}'"]
    commands = ("search --resume", "report")
    return [f"det-amp {command} {folder}" for command in commands]


def own_amp(config: Config) -> Config:
    """The section `amp` of the user's own; empty if there is none of ours."""
    section = config.get("hyperparameters", {}).get("amp")
    return section if isinstance(section, Mapping) else {}


@dataclass(frozen=True)
class RunConfigs:
    """Makes the configurations of runs, which differ in precision, seed and length."""

    experiment: Experiment  # in fp32
    amp: Config  # the section `amp` of all runs, but for the precision
    seeds: int = 1  # number of runs of each precision

    def with_amp(self, changes: Config) -> RunConfigs:
        """The same with changes of the section `amp`; None removes a key."""
        changed = {**self.amp, **changes}
        amp = {key: value for key, value in changed.items() if value is not None}
        return dataclasses.replace(self, amp=amp)

    def pilot(self, precision: Precision, batches: int) -> Experiment:
        """The experiment of a pilot in a precision."""
        amp = {**self.amp, "precision": precision.value}
        period = self.rounded(REPORTING_PERIOD)
        config = self._config({"amp": amp}, self.rounded(batches), period)
        return experiment_in(config, self.experiment.source)

    def search(self, precisions: Sequence[Precision], plan: ComparisonPlan) -> Config:
        """The search over these precisions and all seeds."""
        # A grid begins with its last value: fp32, which the others are compared with.
        names = [precision.value for precision in precisions[::-1]]
        seeds = [self.experiment.seed + i for i in range(self.seeds)]
        ranges = {
            TRIAL_SEED: {"type": "categorical", "vals": seeds},
            "amp": {**self.amp, "precision": {"type": "categorical", "vals": names}},
        }
        config = self._config(ranges, plan.batches, plan.reporting_period)
        config["name"] = f"compare-{self.experiment.name}"
        config["searcher"]["name"] = "grid"
        return config

    def _config(
        self, hyperparameters: Config, batches: int, reporting_period: int
    ) -> Values:
        """The experiment with changed hyperparameters and lengths.

        A run has one validation and one checkpoint, at its end.
        """
        config = copy.deepcopy(dict(self.experiment.config))
        own = {**config["hyperparameters"], **hyperparameters}
        config["hyperparameters"] = own
        if "trial" in own:
            config["entrypoint"] = "python3 -m determined_amp train"
        searcher = self.experiment.platform.searcher
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
            put(config, self.experiment.key_of(name).split("."), length)
        return config

    def rounded(self, batches: int) -> int:
        """A number of batches, rounded up to whole optimizer steps."""
        window = self.experiment.aggregation_frequency
        return -(-batches // window) * window
