"""The command `report`: show a run, compare precisions, or draw the loss scale.

A single run has a report of its own: how it ended, its curves, and where its files are.
The runs of `report precision` must differ in precision and seed only, and include fp32
or tf32. `report loss-scale` shows what the trials of a search measured, and with
`--finding` what the finder predicts: a file that `find --json` wrote, or the id of an
experiment of `hp_search/find_loss_scale.yaml`.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.amp.errors import UserError
from determined_amp.cli.options import AddParser, add_command

if TYPE_CHECKING:
    from determined_amp.report.page import Written
    from determined_amp.search.search_folder import Search

# By report: its own options.
_OPTIONS = {"precision": ("metric", "margin"), "loss-scale": ("finding",)}


def add_report(add_parser: AddParser) -> None:
    """Add the command."""
    text = (
        "show a run, compare runs that differ in precision and seed only, or draw the "
        "effects of the initial loss scale"
    )
    parser = add_command(add_parser, "report", text, _report)
    parser.usage = "det-amp report [precision|loss-scale] SOURCE ... [options]"
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
            "precision: validation metric; default: validation_accuracy, else the"
            " searcher's"
        ),
    )
    parser.add_argument(
        "--margin",
        type=_positive,
        metavar="X",
        help=(
            "precision: what does not matter; default: 0.003 of an accuracy or 1 %% of"
            " the mean"
        ),
    )
    parser.add_argument(
        "--finding",
        metavar="FILE_OR_EXPERIMENT_ID",
        help="loss-scale: the finder's JSON, or its experiment",
    )


def _report(options: Namespace) -> int:
    """Write the report that the first argument names, or the one that fits the first
    source.
    """
    # Numpy and the SDK take a second.
    from determined_amp.report.sources import read_source, report_on  # noqa: PLC0415

    named = options.sources[0] if options.sources[0] in _OPTIONS else None
    options.sources = options.sources[named is not None :]
    if not options.sources:
        options.parser.error("the following arguments are required: SOURCE")
    searches = []
    report = named
    is_alone = len(options.sources) == 1
    for source in options.sources:
        search = read_source(source)
        report = report_on(source, search, report, is_alone=is_alone)
        searches.append(search)
    _check_options(report, options)
    written = _write(report, searches, options)
    print(f"{written.text}\n\nwritten: {', '.join(map(str, written.files))}")
    return 0


def _write(report: str | None, searches: list[Search], options: Namespace) -> Written:
    from determined_amp.report.sources import folder_beside  # noqa: PLC0415
    from determined_amp.search.task import Topic  # noqa: PLC0415

    first = options.sources[0]
    folder = options.output or folder_beside(first)
    if report == "run" and searches[0].runs:
        from determined_amp.report.run_report import write_run_report  # noqa: PLC0415

        return write_run_report(searches[0].runs[0], folder)
    if report == "loss-scale":
        # The finder's classes import torch.
        from determined_amp.report import loss_scale_report  # noqa: PLC0415

        return loss_scale_report.write_loss_scale_report(
            searches[0], folder, options.finding
        )
    if Topic.of(searches[0].config) is Topic.COMPARISON:
        return _fetch_comparison(int(first), options, folder)
    # It draws: matplotlib takes a second, too.
    from determined_amp.report.precision_report import write_precision_report  # noqa: PLC0415

    precisions = write_precision_report(
        searches, folder, options.metric, options.margin
    )
    return precisions.written


def _check_options(report: str | None, options: Namespace) -> None:
    """Raise if an option belongs to another report, or there are too many sources."""
    for other, names in _OPTIONS.items():
        foreign = [name for name in names if getattr(options, name)]
        if foreign and other != report:
            raise UserError(
                f"--{foreign[0]}: belongs to report {other}; this one is report "
                f"{report}"
            )
    if report == "loss-scale" and len(options.sources) > 1:
        raise UserError(
            f"report loss-scale: got {len(options.sources)} sources; allowed: one "
            "search"
        )


def _fetch_comparison(number: int, options: Namespace, folder: Path) -> Written:
    from determined_amp.report.master_runs import fetch_comparison  # noqa: PLC0415

    if options.metric or options.margin or options.sources[1:]:
        raise UserError(
            f"experiment {number}: its task has written the report; allowed: no other "
            "source, and no --metric and --margin"
        )
    return fetch_comparison(number, folder)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"got {text}; allowed: a number above 0")
    return value
