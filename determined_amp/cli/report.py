"""The command `report`: show a run, rank the trials of a search, or compare precisions.

The report on a single run shows how it ended, its curves, and where its files are. For
a search over precisions, or several sources, the report compares the runs. They must
differ in precision and seed only, and include fp32 or tf32.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.amp.errors import UserError
from determined_amp.cli.options import Parser, positive

if TYPE_CHECKING:
    from determined_amp.report.page import Written


# What the command does, for `--help`.
TEXT = (
    "show a run, rank the trials of a search, or compare runs that differ in "
    "precision and seed only"
)


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    parser.usage = "det-amp report SOURCE ... [options]"
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help=(
            "run folder, folder of a local search, or id of an experiment on DET_MASTER"
        ),
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write; default: beside the first source",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help=(
            "of a comparison: validation metric; default: validation_accuracy, else "
            "the searcher's"
        ),
    )
    parser.add_argument(
        "--margin",
        type=positive,
        metavar="X",
        help=(
            "of a comparison: what does not matter; default: 0.003 of an accuracy or "
            "1 %% of the mean"
        ),
    )


def run(options: Namespace) -> int:
    """Write the report on some sources, and print its text."""
    written = _write(options)
    print(f"{written.text}\n\nwritten: {', '.join(map(str, written.files))}")
    return 0


def _write(options: Namespace) -> Written:
    # Importing NumPy and the SDK takes a second, and matplotlib takes another.
    from determined_amp.experiment.entrypoint import Task  # noqa: PLC0415
    from determined_amp.report.comparison import compare_runs  # noqa: PLC0415
    from determined_amp.report.master_runs import fetch_comparison  # noqa: PLC0415
    from determined_amp.report.precision_report import write_precision_report  # noqa: PLC0415
    from determined_amp.report.run_report import write_run_report  # noqa: PLC0415
    from determined_amp.report.search_report import write_search_report  # noqa: PLC0415
    from determined_amp.report.sources import (  # noqa: PLC0415
        folder_beside,
        is_experiment,
        read_source,
    )

    first = options.sources[0]
    folder = options.output or folder_beside(first)
    searches = [read_source(source) for source in options.sources]
    search = searches[0]
    compares = search.compares or len(searches) > 1
    task = Task.of(search.config.get("entrypoint"), [])
    if is_experiment(first) and task.verb == "compare":
        if len(searches) > 1 or options.metric or options.margin:
            raise UserError(
                f"experiment {first} ran compare, which has written its report; "
                f"allowed: det-amp report {first}, without other sources, --metric and "
                "--margin"
            )
        return fetch_comparison(int(first), folder)
    if compares:
        comparison = compare_runs(searches, options.metric, options.margin)
        return write_precision_report(comparison, folder)
    if options.metric or options.margin:
        raise UserError(
            f"--metric and --margin are for a comparison; {first} has another report; "
            f"allowed: det-amp report {first}, or more sources to compare it with"
        )
    if search.is_single and search.runs:
        return write_run_report(search.runs[0], folder)
    return write_search_report(search, folder)
