"""The command `search`: run a search without a cluster, from the same YAML as on a
cluster.

It writes `runs/NAME/TIME/`: the configuration, an Optuna study in `study.db`, and a run
folder per trial. Ctrl-C stops it. If the search or a trial was stopped or killed,
`--resume` continues every trial from its newest checkpoint. `optuna-dashboard
sqlite:///FOLDER/study.db` shows a search, even while it runs.

What differs from a search on a cluster is in docs/cluster.md, "The same search without
a cluster".
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from argparse import Namespace
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.cli import Arguments
from determined_amp.cli.options import Parser, add_override_option, at_least
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides

if TYPE_CHECKING:
    from determined_amp.search.search_plan import SearchPlan

# Each trial is a process with its own torch. A larger machine may have one per
# processor.
_MOST_WORKERS = 16

# What the server imports for the trials. The first optimizer needs `_dynamo`, the first
# report tensorboard, the default data scikit-learn.
PRELOADED = (
    "determined_amp.search.trial_process",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "sklearn.datasets",
)


def main(arguments: Arguments) -> int:
    """Run a search or continue one; the exit status is that of `run_search`."""
    options = _options(arguments)
    plan: SearchPlan | None = None
    if options.search:
        from determined_amp.search.search_plan import SearchPlan  # noqa: PLC0415  # Optuna

        config = with_overrides(read_yaml(options.search), options.overrides)
        plan = SearchPlan(config, options.search)
    start_server()
    # Imported after the server starts: both spend seconds importing torch, at the same
    # time.
    from determined_amp.search.optimize import new_search, run_search  # noqa: PLC0415

    workers = options.workers
    folder = options.resume if plan is None else new_search(plan, workers or 1)
    return run_search(folder, workers)


def start_server(*more: str) -> None:
    """Start the server that forks the trials; it imports torch, and `more`, in the
    background.

    Importing torch and its dependencies takes 8 s; a process forked after that starts
    in 0.3 s. The server starts no threads and does not initialise CUDA, so its forks
    can do both. But importing Determined makes torch look for GPUs. By default torch
    asks CUDA, and then no fork could use a GPU. With the environment variable it asks
    the driver instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*PRELOADED, *more]
    )
    # The server itself ignores SIGINT only after its imports. This way it does so from
    # the start.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _options(arguments: Arguments) -> Namespace:
    parser = Parser(
        prog="python -m determined_amp search",
        description="Run a search on this machine.",
    )
    parser.add_argument("search", nargs="?", help="search YAML")
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
    add_override_option(parser)
    options = parser.parse_args(arguments)
    if bool(options.search) == bool(options.resume):
        parser.error("give either a search YAML, or --resume FOLDER")
    if options.resume and options.overrides:
        parser.error("--resume continues the search unchanged: leave --config out")
    return options
