"""Reads the runs of a local search from its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined_amp.experiment.dotted import flat
from determined_amp.report.source import ReportError, Source
from determined_amp.runs.folder import RunError, read_run
from determined_amp.runs.run import Run, RunState
from determined_amp.search.study_file import FILE_NAME, SearchTrial, StudyError, read_study

_STATES = {
    "complete": RunState.COMPLETED,
    "stopped": RunState.PRUNED,
    "failed": RunState.FAILED,
}

# The file that `compare` writes: the precisions left out, and sentences on the loss scale.
REMARKS = "compare.json"


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
    """A trial from its run folder; without one only its state is known, from the study."""
    try:
        return read_run(trial.folder)
    except RunError as error:
        state = _STATES.get(trial.state, RunState.RUNNING)
        reason = str(error) if trial.folder.is_dir() else "its run folder is not there"
        return Run(f"trial {trial.number} of {path}", state, reason)
