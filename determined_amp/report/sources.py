"""The sources of a report: run folders, local searches, and experiments on a master."""

from __future__ import annotations

from pathlib import Path

from determined_amp.report import ReportError
from determined_amp.report.master_runs import read_experiment
from determined_amp.runs.folder import read_run
from determined_amp.search.search_folder import Search, is_search, read_search


def is_experiment(source: str) -> bool:
    """Whether `source` is the id of an experiment, and not a file or folder of that
    name.
    """
    return source.isdecimal() and not Path(source).exists()


def read_source(source: str) -> Search:
    """Read the runs of a source given on the command line.

    Args:
        source: A run folder, the folder of a local search, or the id of an experiment.

    Raises:
        UserError: if there is no such source, or it cannot be read.
    """
    path = Path(source)
    try:
        if is_experiment(source):
            return read_experiment(int(source))
        if is_search(path):
            return read_search(path)
        if path.is_dir():
            return Search(source, (read_run(path),))
    except OSError as error:
        raise ReportError(
            f"{error.filename or source}: cannot be read: {error.strerror or error}; "
            "allowed: a folder of your own"
        ) from error
    raise ReportError(
        f"{source}: there is no such folder; allowed: a run folder, the folder of a "
        "local search, or the id of an experiment on the master of DET_MASTER"
    )


def folder_beside(source: str) -> Path:
    """The default output folder for a source, which need not exist."""
    return Path(f"runs/experiment-{source}") if is_experiment(source) else Path(source)
