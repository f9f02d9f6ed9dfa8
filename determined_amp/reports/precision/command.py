"""Compare precisions: is AMP on, is it faster and smaller on this model, is it safe?

    python -m report precision runs/mlp-fp32/TIME runs/mlp-amp/TIME ...   # run folders
    python -m report precision runs/SEARCH/TIME                           # a local search
    python -m report precision 12 13                                      # on DET_MASTER
    python -m report precision SOURCE [SOURCE ...] [--metric NAME [--better larger|smaller]]
                                [--margin X] [--output FOLDER]

Give it runs that differ in precision and seed alone, of fp32 or tf32 at least one. It writes
precision.png, precision.html, precision.md and precision.json, and prints the table.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
import optuna

from determined_amp.config.errors import UserError
from determined_amp.reports.document import bullets, document, footer, picture
from determined_amp.reports.document import table as html_table
from determined_amp.reports.figure import as_svg, save_png
from determined_amp.reports.master import experiment_folder, is_experiment
from determined_amp.reports.precision.advice import advise
from determined_amp.reports.precision.cluster import read_trials
from determined_amp.reports.precision.figure import draw
from determined_amp.reports.precision.findings import Findings, find
from determined_amp.reports.precision.folders import read_folder, read_search
from determined_amp.reports.precision.numbers import numbers
from determined_amp.reports.precision.run import Reading
from determined_amp.reports.precision.settings import TRIAL
from determined_amp.reports.precision.words import markdown, sentences, setting, table
from determined_amp.reports.sources import ReportError
from determined_amp.search.study_file import FILE_NAME

_CAPTION = (
    "One colour per precision. Thin lines and dots are runs, thick lines their mean, columns their "
    "median. Speed is of steady reports alone: the first of every process is left out. Equal is "
    "what has its whole interval inside the green band; hollow: one seed, no interval."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 with a report, 2 if there is none."""
    options = _options(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        _report(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _report(options: argparse.Namespace) -> None:
    folder: Path | None = options.output
    if folder is not None and not folder.is_dir():
        raise ReportError(f"--output: got {folder}, which is no folder; allowed: one that is")
    sources = [_read(source) for source in options.sources]
    findings = find(
        [reading for reading, _ in sources],
        options.metric,
        options.margin,
        smaller_is_better=None if options.better is None else options.better == "smaller",
    )
    folder = folder or sources[0][1]
    folder.mkdir(parents=True, exist_ok=True)
    print(_written(findings, folder))
    names = (f"precision.{kind}" for kind in ("png", "html", "md", "json"))
    print(f"written: {', '.join(str(folder / name) for name in names)}")


def _read(source: str) -> tuple[Reading, Path]:
    """What a source holds, and where its report goes unless told otherwise."""
    if is_experiment(source):
        return read_trials(int(source)), experiment_folder(source)
    path = Path(source)
    if path.name == FILE_NAME or (path / FILE_NAME).exists():
        return read_search(path), path if path.is_dir() else path.parent
    if path.is_dir():
        return Reading((read_folder(path),)), path
    raise ReportError(
        f"{source}: there is no such folder; allowed: a run folder, the folder of a local search, "
        "or the id of an experiment on the master of DET_MASTER"
    )


def _written(findings: Findings, folder: Path) -> str:
    """Write the four files; what to print."""
    advice = advise(findings)
    told = sentences(findings, advice)
    drawn = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "matplotlib": matplotlib.__version__,
    }
    title = f"Precisions: {findings.runs[0].settings[TRIAL]}"
    figure = draw(findings)
    save_png(figure, folder / "precision.png")
    page = _page(title, as_svg(figure), findings, told, drawn)
    (folder / "precision.html").write_text(page)
    text = markdown(title, findings, told)
    (folder / "precision.md").write_text(text)
    found = {"drawn": drawn, "sentences": told, **numbers(findings, advice)}
    (folder / "precision.json").write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    return text


def _page(
    title: str, svg: str, findings: Findings, told: Sequence[str], drawn: dict[str, Any]
) -> str:
    runs = [
        [run.name, run.precision.value, str(run.seed), run.state.value, run.reason]
        for run in findings.runs
    ]
    parts = [
        html_table("By precision", *table(findings), unfolded=True),
        bullets(told),
        picture(svg, _CAPTION),
        html_table(f"Runs: {len(runs)}", ["run", "precision", "seed", "state", "reason"], runs),
        footer(
            {"measured": {"on": setting(findings), **findings.machine.versions}, "drawn": drawn}
        ),
    ]
    return document(title, parts)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp report precision",
        description="Compare the precisions of runs that differ in nothing else but their seeds.",
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
        help="direction of --metric; default: the searcher's, or what the name says",
    )
    parser.add_argument(
        "--margin",
        type=_positive,
        metavar="X",
        help="difference that does not matter; default: 0.003 of an accuracy, else 1 %% of the "
        "baseline's mean",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where to write; default: beside the first source",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
