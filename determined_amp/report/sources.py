"""The sources of a report: run folders, local searches, and experiments on a master."""

from __future__ import annotations

from pathlib import Path

from determined_amp.report import ReportError
from determined_amp.report.master_runs import read_experiment
from determined_amp.runs.folder import read_run
from determined_amp.search.search_folder import Search, is_search, read_search
from determined_amp.search.task import Topic

RUN = "run"
PRECISION = "precision"
LOSS_SCALE = "loss-scale"

# By topic: why it has no report.
_ANSWERS = {
    Topic.FINDING: (
        "is the finder's answer, which ends its log, and no search; with a search: "
        "det-amp report loss-scale SEARCH --finding {source}"
    ),
    Topic.CHECK: "is the check of a trial's own AMP; its findings end its log",
}


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


def report_on(
    source: str, search: Search, named: str | None, *, is_alone: bool = True
) -> str:
    """The report on a source: `run`, `precision` or `loss-scale`.

    Args:
        source: The source, as given on the command line.
        search: Its runs.
        named: The report that the user named; None: the source decides.
        is_alone: Whether it is the only source.

    Raises:
        ReportError: if the source has no report, or another one. The message has the
            command.
    """
    topic = Topic.of(search.config)
    if topic in _ANSWERS:
        # A task of one answer reports that, and nothing before it.
        for run in search.runs:
            if not run.reports.validations:
                raise ReportError(f"{search.origin}: has no answer: {run.reason}")
        raise ReportError(f"{search.origin}: {_ANSWERS[topic].format(source=source)}")
    fitting = LOSS_SCALE if topic is Topic.LOSS_SCALES else PRECISION
    if topic is Topic.SINGLE_RUN and is_alone and named is None:
        return RUN
    if topic is Topic.OTHER_SEARCH:
        return named or fitting
    if named not in (None, fitting):
        raise ReportError(
            f"{search.origin}: has no report {named}; its report: det-amp "
            f"report {fitting} {source}"
        )
    return fitting


def folder_beside(source: str) -> Path:
    """The default output folder for a source, which need not exist."""
    return Path(f"runs/experiment-{source}") if is_experiment(source) else Path(source)
