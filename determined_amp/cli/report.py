"""The command `report`: compare precisions, or draw the loss scale, whichever fits the source.

    python -m determined_amp report SOURCE [OPTIONS OF THAT REPORT]

    python -m determined_amp report precision runs/mlp-fp32/TIME runs/mlp-amp/TIME ... # run folders
    python -m determined_amp report precision runs/SEARCH/TIME                     # a local search
    python -m determined_amp report precision 12 13                                # on DET_MASTER
    python -m determined_amp report precision SOURCE [SOURCE ...] [--margin X] [--output FOLDER]
                                [--metric NAME [--better larger|smaller]] [--claims]

The runs must differ in precision and seed only, and include fp32 or tf32. It writes precision.png,
precision.html, precision.md and precision.json, and prints the text.

    python -m determined_amp report loss-scale runs/loss-scale-grid/TIME # without a cluster
    python -m determined_amp report loss-scale 12                        # on DET_MASTER
    python -m determined_amp report loss-scale SOURCE [--finding FINDING] [--output FOLDER]

It writes loss_scale.png, loss_scale.html, loss_scale.md and loss_scale.json. It runs the finder on
this machine, which takes seconds, unless FINDING names a finding: a file written by
`python -m determined_amp find CONFIG --json FILE`, or the id of an experiment of
`hp_search/find_loss_scale.yaml`, which ran on the cluster's own device.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import optuna

from determined_amp.amp.errors import UserError
from determined_amp.report import loss_scale_report, precision_report
from determined_amp.report.master_runs import fetch_comparison
from determined_amp.report.source import ReportError
from determined_amp.report.sources import (
    folder_beside,
    is_experiment,
    is_over_loss_scale,
    read_source,
    refuse_loss_scales,
)


def main(arguments: Sequence[str]) -> int:
    """Write the report that is named, or the one that fits the source.

    Args:
        arguments: The command line; it may begin with `precision` or `loss-scale`.

    Returns:
        The exit status, 0.

    Raises:
        UserError: if the report cannot be made.
    """
    named = arguments[0] if arguments and arguments[0] in _REPORTS else None
    if named is None:
        if not arguments or arguments[0].startswith("-"):
            raise UserError("report: no source given; allowed: report SOURCE, then options")
        over_loss_scale = is_over_loss_scale(read_source(arguments[0]))
    make_parser, write = _REPORTS[named or ("loss-scale" if over_loss_scale else "precision")]
    parser = make_parser()
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write; default: beside the first source",
    )
    options = parser.parse_args(arguments[named is not None :])
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder = options.output
    if folder is not None and not folder.is_dir():
        raise ReportError(
            f"--output: got {folder}, which is no folder; allowed: an existing folder"
        )
    write(options)
    return 0


def _precision_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp report precision",
        description="Compare runs that differ in precision and seed only.",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="run folder, folder of a local search, or id of an experiment on DET_MASTER",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="validation metric; default: validation_accuracy, else the searcher's",
    )
    parser.add_argument(
        "--better",
        choices=("larger", "smaller"),
        help="direction of --metric; default: the searcher's, or that which the name implies",
    )
    parser.add_argument(
        "--margin",
        type=_positive,
        metavar="X",
        help="difference that does not matter; default: 0.003 of an accuracy, else 1 %% of the "
        "baseline's mean",
    )
    parser.add_argument(
        "--claims",
        action="store_true",
        help="judge the claims of the literature for ResNet-50, as for this repository's trials",
    )
    return parser


def _positive(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {given}; allowed: a number above 0")
    return value


def _report_precisions(options: argparse.Namespace) -> None:
    source, *others = options.sources
    if not others and is_experiment(source):
        folder = options.output or folder_beside(source)
        fetched = fetch_comparison(int(source), folder)
        if fetched is not None and (options.metric or options.better or options.margin):
            raise ReportError(
                f"experiment {source}: its task has written the report; allowed: no --metric, "
                "--better and --margin"
            )
        if fetched is not None:
            print(f"{fetched}\nwritten: {folder}")
            return
    sources = [read_source(source, with_settings=True) for source in options.sources]
    for given, read in zip(options.sources, sources, strict=True):
        refuse_loss_scales(given, read)
    folder = options.output or folder_beside(source)
    better = None if options.better is None else options.better == "smaller"
    written = precision_report.write_report(
        sources,
        folder,
        metric=options.metric,
        margin=options.margin,
        smaller_is_better=better,
        judge_claims=options.claims,
    )
    print(f"{written.markdown}\nwritten: {', '.join(map(str, written.files))}")


def _loss_scale_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp report loss-scale",
        description="Draw the predicted and the observed effects of the initial loss scale.",
    )
    parser.add_argument(
        "source",
        metavar="STUDY_OR_EXPERIMENT_ID",
        help="folder of a local search, or id of an experiment on the master of DET_MASTER",
    )
    parser.add_argument(
        "--finding",
        metavar="FILE_OR_EXPERIMENT_ID",
        help="the finder's JSON, or its experiment on the master, instead of running it here",
    )
    return parser


def _report_loss_scale(options: argparse.Namespace) -> None:
    told, files = loss_scale_report.write_report(options.source, options.output, options.finding)
    print("\n".join(told))
    print(f"written: {', '.join(map(str, files))}")


# By the name of a report: its parser, and what writes it.
_REPORTS = {
    "precision": (_precision_parser, _report_precisions),
    "loss-scale": (_loss_scale_parser, _report_loss_scale),
}
