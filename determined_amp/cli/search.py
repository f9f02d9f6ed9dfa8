"""The command `search`: run a search without a cluster, from the same YAML as on a
cluster.

It writes `runs/NAME/TIME/`: the configuration, an Optuna study in `study.db`, and a run
folder per trial. Ctrl-C stops it. If the search or a trial was stopped or killed,
`--resume` continues every trial from its newest checkpoint. `optuna-dashboard
sqlite:///FOLDER/study.db` shows a search, even while it runs.

docs/cluster.md says how this differs from a search on a cluster, in "The same search
without a cluster".
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from determined_amp.cli.options import (
    Parser,
    add_trial_options,
    at_least,
    configuration_of,
)
from determined_amp.search.server import start_server

# Each trial is a process with its own torch. A machine with more processors may have
# one worker per processor.
_MOST_WORKERS = 16


# What the command does, for `--help`.
TEXT = "run a search on this machine, without a cluster"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_trial_options(parser, precision=False, needs_config=False)
    parser.add_argument(
        "--resume",
        metavar="FOLDER",
        type=Path,
        help="continue the search in this folder",
    )
    parser.add_argument(
        "--workers",
        metavar="N",
        type=at_least(1, max(_MOST_WORKERS, os.cpu_count() or 1)),
        help="number of concurrent trials (1, or as many as before a --resume)",
    )


def run(options: Namespace) -> int:
    """Run or continue a search, and return the exit status of `run_search`."""
    if bool(options.config) == bool(options.resume):
        options.parser.error("give either a search YAML, or --resume FOLDER")
    if options.resume and (options.overrides or options.trial):
        options.parser.error(
            "--resume continues the search unchanged: leave --config and --trial out"
        )
    from determined_amp.experiment.entrypoint import with_trial  # noqa: PLC0415
    from determined_amp.runs.folder import STUDY_FILE, check_folder  # noqa: PLC0415
    from determined_amp.search.search_folder import SEARCH_FILE, read_config  # noqa: PLC0415
    from determined_amp.search.search_plan import SearchPlan  # noqa: PLC0415  # Optuna

    if options.resume:
        files, what = (STUDY_FILE, SEARCH_FILE), "a search, runs/NAME/TIME"
        check_folder(options.resume, files, what)
        plan = SearchPlan(read_config(options.resume), str(options.resume))
    else:
        config = with_trial(configuration_of(options), options.trial)
        plan = SearchPlan(config, options.config)
    start_server()
    # Import this after the server starts, so that both import torch at the same time.
    # It takes seconds.
    from determined_amp.search.optimize import new_search, run_search  # noqa: PLC0415

    folder, workers = options.resume, options.workers
    if folder is None:
        folder = new_search(plan, workers or 1)
    return run_search(folder, plan, workers)
