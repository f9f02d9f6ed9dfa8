"""Draw what the finder predicts of every initial loss scale, and what a search observed.

    python -m determined_amp report loss-scale runs/loss-scale-grid/TIME # without a cluster
    python -m determined_amp report loss-scale 12                        # one on DET_MASTER
    python -m determined_amp report loss-scale SOURCE [--finding FINDING] [--output FOLDER]

It writes loss_scale.png and loss_scale.html. The prediction is made here, where that takes seconds,
or was made elsewhere: FINDING is what `finder.find CONFIG --json FILE.json` wrote, or
the id of an experiment of `hp_search/find_loss_scale.yaml`, made on the cluster's own device.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
import optuna

from determined_amp.config.errors import UserError
from determined_amp.config.settings import ConfigError
from determined_amp.finder.advice import FoundScale, lines_to_paste
from determined_amp.finder.advice import sentences as finder_sentences
from determined_amp.reports.cluster import read_experiment, read_finding
from determined_amp.reports.figure import as_svg, draw, save_png
from determined_amp.reports.master import experiment_folder, is_experiment
from determined_amp.reports.observed import sentences
from determined_amp.reports.page import page
from determined_amp.reports.predict import environment_of, predict
from determined_amp.reports.sources import Search, read_local


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
        raise ConfigError("--output", [f"got {folder}, which is no folder; allowed: one that is"])
    given = _finding(options.finding) if options.finding else None
    search, beside = _read(options.source)
    found, missing = (given, "") if given else _predicted(search)
    finding = found.finding if found else None
    said = finder_sentences(found.finding, found.run) if found else [missing]
    told = [*said, *sentences(found, search)]
    figure = draw(finding, search)
    folder = folder or beside
    folder.mkdir(parents=True, exist_ok=True)
    save_png(figure, folder / "loss_scale.png")
    document = page(
        f"Initial loss scale: {search.name}",
        svg=as_svg(figure),
        sentences=told,
        finding=finding,
        search=search,
        provenance=_provenance(found, search),
        yaml=lines_to_paste(found.finding, found.run) if found else "",
    )
    (folder / "loss_scale.html").write_text(document)
    print("\n".join(told))
    print(f"written: {folder / 'loss_scale.png'} and {folder / 'loss_scale.html'}")


def _read(source: str) -> tuple[Search, Path]:
    """The search, and where its report goes unless told otherwise."""
    if is_experiment(source):
        return read_experiment(int(source)), experiment_folder(source)
    path = Path(source)
    return read_local(path), path if path.is_dir() else path.parent


def _finding(source: str) -> FoundScale:
    return read_finding(int(source)) if is_experiment(source) else FoundScale.read(Path(source))


def _predicted(search: Search) -> tuple[FoundScale | None, str]:
    """The finder's word, or why there is none: an observation is worth drawing without it."""
    try:
        return predict(search), ""
    except UserError as error:
        reason = " ".join(str(error).split())
        return None, (
            f"no prediction: {reason}. Where the experiment is, `python -m determined_amp find "
            "CONFIG --json FILE` or `det experiment create hp_search/find_loss_scale.yaml .` makes "
            "one for --finding"
        )


def _provenance(found: FoundScale | None, search: Search) -> dict[str, Mapping[str, Any]]:
    seeds = {row.seed for row in search.rows if row.seed is not None}
    trials: dict[str, Any] = {"trials": len(search.rows), "seeds": len(seeds) or "unknown"}
    drawn = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "matplotlib": matplotlib.__version__,
    }
    parts: dict[str, Mapping[str, Any]] = {
        "search": {"from": search.origin, **trials, **search.environment},
        "drawn": drawn,
    }
    return parts if found is None else {"finder": environment_of(found), **parts}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp report loss-scale",
        description="Draw what was predicted and observed of the initial loss scale.",
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
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where to write; default: beside the study"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
