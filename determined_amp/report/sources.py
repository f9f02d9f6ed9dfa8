"""The sources of a report: run folders, local searches, and experiments on a master."""

from __future__ import annotations

import os
from pathlib import Path

from determined_amp.report.master_runs import read_experiment
from determined_amp.runs.folder import RUN_FILE, STUDY_FILE, check_folder, read_run
from determined_amp.search.search_folder import Search, read_search

_ALLOWED = (
    "a run folder, the folder of a local search, or the id of an experiment on the "
    "master of DET_MASTER"
)


def is_experiment(source: str) -> bool:
    """Whether `source` is the id of an experiment. A path of that name has priority."""
    is_number = source.isdecimal() and len(source) < 20
    return is_number and not os.path.exists(source)


def read_source(source: str) -> Search:
    """Read the runs of a source given on the command line.

    Args:
        source: A run folder, the folder of a local search, or the id of an experiment.

    Raises:
        UserError: if there is no such source, or it cannot be read.
    """
    path = Path(source)
    if is_experiment(source):
        return read_experiment(int(source))
    check_folder(path, (RUN_FILE, STUDY_FILE), _ALLOWED)
    if (path / STUDY_FILE).exists():
        return read_search(path)
    return Search(source, (read_run(path),))


def folder_beside(source: str) -> Path:
    """The default folder for the report on a source. It need not exist."""
    return Path(f"runs/experiment-{source}") if is_experiment(source) else Path(source)
