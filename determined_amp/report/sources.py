"""The sources of a report: run folders, local searches, and experiments on a master."""

from __future__ import annotations

from pathlib import Path

from determined_amp.report import ReportError
from determined_amp.report.master_runs import read_experiment
from determined_amp.runs.folder import read_run
from determined_amp.search.search_folder import STUDY_FILE, Search, is_search, read_search
from determined_amp.search.task import Topic

_REPORT = "python -m determined_amp report"

# By topic: the reports that fit, and why another one does not.
_REPORTS = {
    Topic.FINDING: (
        (),
        "is the finder's answer, which ends its log, and no search; with a search: "
        f"{_REPORT} loss-scale SEARCH --finding {{source}}",
    ),
    Topic.CHECK: ((), "is the check of a trial's own AMP; its findings end its log"),
    Topic.LOSS_SCALES: (
        ("loss-scale",),
        "searches for the loss scale, in one precision; its report: "
        f"{_REPORT} loss-scale {{source}}",
    ),
    **dict.fromkeys(
        (Topic.COMPARISON, Topic.PRECISIONS),
        (("precision",), f"compares precisions; its report: {_REPORT} precision {{source}}"),
    ),
    Topic.SINGLE_RUN: (
        ("precision",),
        "is a single run, no search; with runs in other precisions: "
        f"{_REPORT} precision {{source}} OTHERS",
    ),
    Topic.OTHER_SEARCH: (("precision", "loss-scale"), ""),
}


def is_experiment(source: str) -> bool:
    """Whether `source` is the id of an experiment, and not a file or folder of that name."""
    return source.isdecimal() and not Path(source).exists()


def read_source(source: str) -> Search:
    """Read the runs of a source given on the command line.

    Args:
        source: A run folder, the folder of a local search or its `study.db`, or the id of an
            experiment.

    Raises:
        UserError: if there is no such source, or it cannot be read.
    """
    path = Path(source)
    try:
        if is_experiment(source):
            return read_experiment(int(source))
        if is_search(path):
            return read_search(path.parent if path.name == STUDY_FILE else path)
        if path.is_dir():
            return Search(source, (read_run(path),))
    except OSError as error:
        raise ReportError(
            f"{error.filename or source}: cannot be read: {error.strerror or error}; allowed: a "
            "folder of your own"
        ) from error
    raise ReportError(
        f"{source}: there is no such folder; allowed: a run folder, the folder of a local search, "
        "or the id of an experiment on the master of DET_MASTER"
    )


def report_for(search: Search) -> str:
    """The report that fits a source: `precision` or `loss-scale`."""
    reports, _ = _REPORTS[Topic.of(search.config)]
    return reports[0] if reports else "loss-scale"


def check_report(report: str, source: str, search: Search) -> None:
    """Check that a report fits a source.

    Raises:
        ReportError: if it does not fit. The message has the command that does.
    """
    reports, why_not = _REPORTS[Topic.of(search.config)]
    if report not in reports:
        # A task of one answer reports that, and nothing before it.
        unanswered = [run for run in search.runs if not run.reports.validations]
        if unanswered and not reports:
            raise ReportError(f"{search.origin}: has no answer: {unanswered[0].reason}")
        raise ReportError(f"{search.origin}: {why_not.format(source=source)}")


def folder_beside(source: str) -> Path:
    """The default output folder for a source; it is created if it does not exist.

    Raises:
        ReportError: if it cannot be created.
    """
    path = Path(source)
    if is_experiment(source):
        path = Path("runs") / f"experiment-{source}"
    elif path.is_file():
        path = path.parent
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(
            f"{path}: cannot be made: {error.strerror}; allowed: --output with an existing folder"
        ) from error
    return path
