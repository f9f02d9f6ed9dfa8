"""The sources of a report: run folders, local searches, and experiments on a master."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import matplotlib

from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import searcher_of
from determined_amp.report.master_runs import read_experiment
from determined_amp.report.run_folders import read_search
from determined_amp.report.source import ReportError, Source
from determined_amp.runs.folder import read_run
from determined_amp.runs.run import is_scale
from determined_amp.search.search_folder import is_search
from determined_amp.search.task import Task, Verb


def is_experiment(source: str) -> bool:
    """Whether `source` is the id of an experiment, and not a file or folder of that name."""
    return source.isdecimal() and not Path(source).exists()


def read_source(source: str, *, with_settings: bool = False) -> Source:
    """Read the runs of a source given on the command line.

    Args:
        source: A run folder, the folder of a local search or its `study.db`, or the id of an
            experiment.
        with_settings: See `read_experiment`; run folders are always read with settings.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such source.
    """
    if is_experiment(source):
        return read_experiment(int(source), with_settings=with_settings)
    path = Path(source)
    if is_search(path):
        return read_search(path)
    if path.is_dir():
        return Source(source, (read_run(path),))
    raise ReportError(
        f"{source}: there is no such folder; allowed: a run folder, the folder of a local search, "
        "or the id of an experiment on the master of DET_MASTER"
    )


_REPORT = "python -m determined_amp report"


def refuse_precisions(given: str, source: Source) -> None:
    """Refuse a source that the loss-scale report cannot draw.

    Args:
        given: The source, as it was typed.
        source: The runs that were read from it.

    Raises:
        ReportError: if the source is no search for a loss scale. The message has the right command.
    """
    config = source.config
    if _verb(source) is Verb.FIND:
        raise ReportError(
            f"{source.origin}: is the finder's answer, which ends its log, and no search; with a "
            f"search: {_REPORT} loss-scale SEARCH --finding {given}"
        )
    if _compares(source):
        raise ReportError(
            f"{source.origin}: compares precisions; its report: {_REPORT} precision {given}"
        )
    if "searcher" not in config or searcher_of(config).name == "single":
        raise ReportError(
            f"{source.origin}: is a single run, no search; with runs in other precisions: "
            f"{_REPORT} precision {given} OTHERS"
        )


def refuse_loss_scales(given: str, source: Source) -> None:
    """Refuse a source that belongs in the loss-scale report.

    Args:
        given: The source, as it was typed.
        source: The runs that were read from it.

    Raises:
        ReportError: if the source is about the loss scale. The message has the right command.
    """
    if _verb(source) is Verb.FIND:
        refuse_precisions(given, source)
    if is_over_loss_scale(source):
        raise ReportError(
            f"{source.origin}: searches for the loss scale, in one precision; its report: "
            f"{_REPORT} loss-scale {given}"
        )


def is_over_loss_scale(source: Source) -> bool:
    """Whether a source is about the loss scale, not about precisions."""
    if _compares(source):
        return False
    return _verb(source) in (Verb.FIND, Verb.SCORE) or any(map(is_scale, _searched(source)))


def _compares(source: Source) -> bool:
    """Whether a source ran the command `compare`, or is a search over precisions."""
    return _verb(source) is Verb.COMPARE or "amp.precision" in _searched(source)


def _verb(source: Source) -> Verb | None:
    task = Task.of(source.config)
    return None if task is None else task.verb


def _searched(source: Source) -> list[str]:
    """The dotted names of the hyperparameters that a source searches over."""
    spaces = flat(source.config.get("hyperparameters") or {})
    return [name for name, value in spaces.items() if isinstance(value, Mapping)]


def folder_beside(source: str) -> Path:
    """The default output folder for a source; it is created if it does not exist."""
    path = Path(source)
    if is_experiment(source):
        path = Path("runs") / f"experiment-{source}"
    elif path.is_file():
        path = path.parent
    path.mkdir(parents=True, exist_ok=True)
    return path


def drawn_with() -> dict[str, str]:
    """The date of a report, and the versions it was made with."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "matplotlib": matplotlib.__version__,
    }
