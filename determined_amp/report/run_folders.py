"""Reads the runs of this machine: run folders, and the trials of a local search."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from determined_amp.experiment.dotted import flat
from determined_amp.experiment.errors import one_line
from determined_amp.experiment.yaml_text import load_yaml
from determined_amp.local.folder import End, read_end, read_metrics
from determined_amp.report.run_settings import SEED, by_name
from determined_amp.report.runs import Machine, Report, ReportError, Run, Source, ended
from determined_amp.search.study_file import FILE_NAME, SearchTrial, StudyError, read_study

_VERSIONS = ("python", "torchvision", "numpy", "determined", "platform", "commit")

# The file that `compare` writes: the precisions left out, and sentences on the loss scale.
REMARKS = "compare.json"


def read_folder(path: Path) -> Run:
    """Read the run in a run folder.

    Raises:
        ReportError: if the folder is not a run folder.
    """
    return _read(path, read_end)


def is_search(path: Path) -> bool:
    """Whether `path` is the folder of a local search, or its `study.db`."""
    return path.name == FILE_NAME or (path / FILE_NAME).exists()


def read_search(path: Path) -> Source:
    """Read the trials of a local search from its folder or its `study.db`.

    Raises:
        ReportError: if there is no search.
    """
    try:
        study = read_study(path)
    except StudyError as error:
        raise ReportError(
            f"{error}; allowed: the folder of a search by `python -m determined_amp search`, or "
            "the id of an experiment on a cluster"
        ) from error
    constants = {
        name: value
        for name, value in flat(study.search["hyperparameters"]).items()
        if not isinstance(value, Mapping)
    }
    runs = (
        dataclasses.replace(
            _trial(path, trial),
            number=trial.number,
            hparams={**constants, **(flat(trial.used) or trial.params)},
            shares_device=study.workers > 1,
        )
        for trial in study.trials
    )
    return Source(str(path), tuple(runs), study.search, **_remarks(path))


def _remarks(path: Path) -> Mapping[str, Any]:
    """The remarks of the command `compare` on its runs."""
    file = path / REMARKS
    if not file.is_file():
        return {}
    try:
        noted = json.loads(file.read_text())
        return {key: tuple(map(str, noted[key])) for key in ("left_out", "notes")}
    except (ValueError, LookupError, TypeError) as error:
        raise ReportError(f"{file}: is not what `compare` writes: {error}") from error


def _trial(path: Path, trial: SearchTrial) -> Run:
    """A trial from its run folder, or from the study if the folder is gone."""
    # The study knows why a trial ended; a run folder does not know of its search.
    ends = {
        "complete": End("completed", "", 0),
        "failed": End("failed", trial.reason or "the search does not say why", 0),
        "stopped": End("stopped", "stopped early by the search", 0),
    }
    end = ends.get(trial.state)
    try:
        return _read(trial.folder, read_end if end is None else lambda _: end)
    except ReportError as error:
        training = (Report(0, trial.training),) if trial.training else ()
        validation = tuple(Report(batches, metrics) for batches, metrics in trial.history)
        state, reason = ended({}, training, validation, end)
        gone = not trial.folder.is_dir()
        reason = reason or ("its run folder is not there" if gone else str(error))
        name = f"trial {trial.number} of {path}"
        return Run(name, {}, training, validation, state, reason, trial.seed)


def _read(path: Path, end_of: Callable[[Path], End | None]) -> Run:
    try:
        end = end_of(path)
        settings = by_name(load_yaml((path / "resolved.yaml").read_text(), "resolved.yaml"))
        machine = _machine(json.loads((path / "environment.json").read_text()))
        training, validation = _reports(path / "metrics.jsonl")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ReportError(
            f"{path}: is not a run folder that this version reads: {type(error).__name__} "
            f"{one_line(error)}; allowed: what `python -m determined_amp train` leaves in "
            "runs/NAME/TIME"
        ) from error
    state, reason = ended(settings, training, validation, end)
    return Run(str(path), settings, training, validation, state, reason, settings[SEED], machine)


def _machine(environment: Mapping[str, Any]) -> Machine:
    device = environment["device"]
    on_gpu = device["name"] != "cpu"
    # CPUs with different numbers of processors or threads count as different devices.
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


def _reports(path: Path) -> tuple[tuple[Report, ...], tuple[Report, ...]]:
    """The training reports and the validation reports."""
    found: dict[str, list[Report]] = {"training": [], "validation": []}
    for line in read_metrics(path):
        numbers = {n: float(v) for n, v in line.items() if isinstance(v, (int, float))}
        found.setdefault(line["group"], []).append(Report(int(numbers.pop("batches")), numbers))
    if not any(found.values()) and path.exists() and path.read_bytes().count(b"\n"):
        raise ValueError("metrics.jsonl has no report in it")
    return tuple(found["training"]), tuple(found["validation"])
