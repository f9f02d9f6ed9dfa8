"""Runs of this machine: run folders, and the trials of a local search."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from determined_amp.local.folder import read_metrics
from determined_amp.reports.precision.run import (
    Machine,
    Reading,
    Report,
    Run,
    State,
    ended,
    one_line,
)
from determined_amp.reports.precision.settings import SEED, by_name
from determined_amp.reports.sources import ReportError
from determined_amp.search.study_file import SearchTrial, StudyError, read_study

_VERSIONS = ("python", "torchvision", "numpy", "determined", "platform", "commit")


def read_folder(path: Path) -> Run:
    """The run in a run folder.

    Raises:
        ReportError: if it is none.
    """
    try:
        settings = by_name(yaml.safe_load((path / "resolved.yaml").read_text()))
        machine = _machine(json.loads((path / "environment.json").read_text()))
        reports = _reports(path / "metrics.jsonl")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise ReportError(
            f"{path}: is not a run folder that this version reads: {type(error).__name__} "
            f"{one_line(str(error))}; allowed: what `python -m determined_amp train` leaves in "
            "runs/NAME/TIME"
        ) from error
    state, reason = ended(settings, reports["training"], reports["validation"])
    return Run(str(path), settings, machine, settings[SEED], state=state, reason=reason, **reports)


def read_search(path: Path) -> Reading:
    """The trials of a local search, in its folder or its `study.db`.

    Raises:
        ReportError: if there is none.
    """
    try:
        study = read_study(path)
    except StudyError as error:
        raise ReportError(str(error)) from error
    runs, unread = [], []
    for trial in study.trials:
        try:
            run = _of_search(read_folder(trial.folder), trial)
            runs.append(dataclasses.replace(run, shares_device=study.workers > 1))
        except ReportError:
            why = one_line(trial.reason or "its run folder is not there")
            unread.append(f"trial {trial.number} of {path}: {trial.state}: {why}")
    return Reading(tuple(runs), tuple(unread))


def _of_search(run: Run, trial: SearchTrial) -> Run:
    """The search knows more of its end than the run folder does."""
    if trial.state == "failed":
        why = one_line(trial.reason or "the search does not say why")
        return dataclasses.replace(run, state=State.FAILED, reason=why)
    if trial.state == "stopped":
        why = f"{run.reason.partition(':')[0]}: stopped early by the search"
        return dataclasses.replace(run, state=State.UNFINISHED, reason=why)
    return run


def _machine(environment: Mapping[str, Any]) -> Machine:
    device = environment["device"]
    on_gpu = device["name"] != "cpu"
    # How many threads of how many processors is what makes two CPUs here the same device.
    processors, threads = environment["processors"], environment["torch_threads"]
    cpu = f"cpu ({processors} processors, torch threads: {threads})"
    return Machine(
        device=str(device["name"]) if on_gpu else cpu,
        on_gpu=on_gpu,
        has_tf32=bool(device["tf32"]),
        torch=str(environment["torch"]),
        versions={name: environment[name] for name in _VERSIONS if name in environment},
        date=str(environment["date"]),
    )


def _reports(path: Path) -> dict[str, Any]:
    """The reports by group."""
    found: dict[str, list[Report]] = {"training": [], "validation": []}
    for line in read_metrics(path):
        numbers = {n: float(v) for n, v in line.items() if isinstance(v, (int, float))}
        found.setdefault(line["group"], []).append(Report(int(numbers.pop("batches")), numbers))
    return {group: tuple(found[group]) for group in ("training", "validation")}
