"""Runs the steps of the command `compare`: pilots, a plan, the runs, the answer."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import determined as det

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Config
from determined_amp.amp.settings import Precision
from determined_amp.compare.comparable import ComparisonRequest
from determined_amp.compare.pilots import (
    TOO_SLOW,
    PilotResults,
    lengths_of,
    run_pilots,
)
from determined_amp.compare.plan import ComparisonPlan, plan_lines, plan_of
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.entrypoint import TRAIN
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.failures import is_task
from determined_amp.experiment.files import write_whole
from determined_amp.experiment.hyperparameters import TRIAL_SEED
from determined_amp.experiment.overrides import with_overrides
from determined_amp.report.comparison import Comparison, compare_runs
from determined_amp.report.precision_report import write_precision_report
from determined_amp.runs.folder import fresh_folder
from determined_amp.runs.run import AMP, HAVE_ENDED
from determined_amp.search.optimize import BY_A_SIGNAL, run_comparison
from determined_amp.search.search_folder import (
    read_search,
    write_config,
    write_remarks,
)
from determined_amp.search.search_plan import SearchPlan

# The answer if there is nothing to compare.
ONLY_FP32 = (
    f"use fp32: every other precision failed or was more than {TOO_SLOW:g}x slower"
)


@dataclass(frozen=True)
class ComparisonEnd:
    """How a comparison ended."""

    folder: Path
    comparison: Comparison | None = None  # None if only fp32 could be trained
    is_interrupted: bool = False  # whether a signal stopped it


def compare(experiment: Experiment, request: ComparisonRequest) -> ComparisonEnd:
    """Compare the precisions of a trial, and print which one to use.

    Args:
        experiment: The experiment of the trial, in fp32; see `check_comparable`.
        request: What the user asks.

    Raises:
        UserError: if the trial cannot be trained in fp32.
    """
    experiment = experiment.loaded()
    # A search is checked more strictly than a run. Name its mistakes before the pilots.
    window = experiment.aggregation_frequency
    shortest = ComparisonPlan(window, window, request.seeds)
    SearchPlan(search_over(experiment, request.precisions, shortest), experiment.source)
    folder = fresh_folder(f"compare-{experiment.name}")
    results = PilotResults()
    try:
        run_pilots(experiment, request.precisions, results, folder / "pilots")
    finally:  # after Ctrl-C, too
        print(results)
    if len(results.pilots) < 2:
        return _only_fp32(folder, results)
    plan = plan_of(results, experiment, request)
    print("\n".join(plan_lines(results, plan)), flush=True)
    program = "python3 -m determined_amp" if is_task() else "det-amp"
    command = f"{program} {shlex.join(request.words)}"
    write_remarks(folder, results.reasons, results.notes, command)
    if results.scale is not None and Precision.AMP_FP16 in results.pilots:
        found = results.scale["yaml"].items()
        changes = [f"{AMP}.{key}={json.dumps(value)}" for key, value in found]
        experiment = experiment.variant(changes)
    config = search_over(experiment, list(results.pilots), plan)
    search = SearchPlan(write_config(folder, config, workers=1))
    cut_short = run_comparison(folder, search, plan.time_limit)
    comparison = _report(folder, search, cut_short)
    return ComparisonEnd(folder, comparison, cut_short == BY_A_SIGNAL)


def search_over(
    experiment: Experiment, precisions: Sequence[Precision], plan: ComparisonPlan
) -> Config:
    """The search over these precisions and all seeds."""
    lengths = lengths_of(experiment, plan.batches, plan.reporting_period)
    config = with_overrides(experiment.config, lengths)
    # A grid begins with its last value. This is fp32, which the others are compared
    # with.
    names = [precision.value for precision in precisions[::-1]]
    seeds = [experiment.seed + i for i in range(plan.seeds)]
    own = config["hyperparameters"]
    own["amp"]["precision"] = {"type": "categorical", "vals": names}
    own[TRIAL_SEED] = {"type": "categorical", "vals": seeds}
    # The entrypoint may be another command, such as `compare`.
    config["entrypoint"] = f"{TRAIN} --trial {shlex.quote(experiment.trial)}"
    ranks = experiment.platform.searcher
    config["searcher"] = {
        "name": "grid",
        "metric": ranks.metric,
        "smaller_is_better": ranks.smaller_is_better,
        "max_length": value_at(config, "searcher.max_length"),
    }
    config["name"] = f"compare-{experiment.name}"
    return config


def _only_fp32(folder: Path, results: PilotResults) -> ComparisonEnd:
    """Print that there is nothing to compare, and write a page that says so."""
    print(f"\n{ONLY_FP32} (see above)\n\nthe page: {_page(folder)}")
    reasons = "".join(f"* {reason}\n" for reason in results.reasons)
    write_whole(folder / "precision.md", f"# {ONLY_FP32}\n\n{reasons}")
    return ComparisonEnd(folder)


def _report(folder: Path, search: SearchPlan, cut_short: str) -> Comparison:
    """Write the report on the runs that have ended, and print its answer.

    `cut_short` is what `run_comparison` returned.
    """
    made = read_search(folder)
    ended = tuple(run for run in made.runs if run.state in HAVE_ENDED)
    planned = len(search.points)
    left_out = made.left_out
    if len(ended) < planned:
        done = f"{len(ended)} of {planned} runs were finished {cut_short}"
        left_out = (*left_out, f"{done}; for the others: {_to_go_on(folder)}")
    try:
        source = replace(made, runs=ended, left_out=left_out)
        comparison = compare_runs([source])
        written = write_precision_report(comparison, folder)
    except UserError as error:
        if cut_short == BY_A_SIGNAL:
            raise KeyboardInterrupt(str(error)) from error
        raise
    print(f"\n{written.text}\n\nthe page with all numbers: {_page(folder)}")
    return comparison


def _page(folder: Path) -> str:
    """The path of the page; on a cluster the command that shows it."""
    info = det.get_cluster_info()
    if info is None:
        return str(folder / "precision.md")
    return f"det-amp report {info.trial.experiment_id}"


def _to_go_on(folder: Path) -> str:
    """How to get the missing runs: a command, or a new task on a cluster."""
    if is_task():  # the folder is lost with its task
        return "another task with more --minutes"
    return f"det-amp search --resume {folder}, then det-amp report {folder}"
