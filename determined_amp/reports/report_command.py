"""What the commands of the reports share: sources, output folder, errors in one sentence."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import matplotlib
import optuna

from determined_amp.config.errors import UserError
from determined_amp.reports.master_runs import read_experiment
from determined_amp.reports.run_folders import is_search, read_folder, read_search
from determined_amp.reports.runs import ReportError, Source


def run(
    report: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> int:
    """Write a report.

    Args:
        report: Writes it; `output` of its options is None, or a folder.
        parser: Of its options, without `--output`.
        arguments: Of the command line.

    Returns:
        The exit status: 0 with a report, 2 if there is none.
    """
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write; default: beside the first source",
    )
    options = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        folder = options.output
        if folder is not None and not folder.is_dir():
            raise ReportError(f"--output: got {folder}, which is no folder; allowed: one that is")
        report(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def is_experiment(source: str) -> bool:
    """Whether it is the id of an experiment, and not a file or folder of that name."""
    return source.isdecimal() and not Path(source).exists()


def read(source: str, *, with_settings: bool = False) -> Source:
    """What a source of the command line holds.

    Args:
        source: A run folder, the folder of a local search or its `study.db`, or the id of an
            experiment.
        with_settings: As for `read_experiment`; of this machine, they are always read.

    Raises:
        ReportError: if there is no such source.
    """
    if is_experiment(source):
        return read_experiment(int(source), with_settings=with_settings)
    path = Path(source)
    if is_search(path):
        return read_search(path)
    if path.is_dir():
        return Source(source, (read_folder(path),))
    raise ReportError(
        f"{source}: there is no such folder; allowed: a run folder, the folder of a local search, "
        "or the id of an experiment on the master of DET_MASTER"
    )


def folder_beside(source: str) -> Path:
    """Where the report on a source goes unless told otherwise; it is made."""
    path = Path(source)
    if is_experiment(source):
        path = Path("runs") / f"experiment-{source}"
    elif path.is_file():
        path = path.parent
    path.mkdir(parents=True, exist_ok=True)
    return path


def drawn() -> dict[str, str]:
    """When and with what a report was made."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "matplotlib": matplotlib.__version__,
    }
