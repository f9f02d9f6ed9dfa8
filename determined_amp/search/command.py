"""The command `search`: a search without a cluster, from the YAML that a cluster takes.

    python -m determined_amp search SEARCH.yaml [--workers N] [--config KEY=VALUE ...]
    python -m determined_amp search --resume FOLDER [--workers N]

It leaves `runs/NAME/TIME/`: the configuration, an Optuna study in `study.db`, and a run folder per
trial. Ctrl-C stops it; stopped, killed, or with a worker killed, every trial goes on from its
newest checkpoint. `optuna-dashboard sqlite:///FOLDER/study.db` shows it, also while it runs.

Points of a grid, ranges and their scales, nesting, brackets, rungs and what follows an invalid
trial are the platform's. What differs, because it has to:

* A comparison takes its seeds by turns, where the platform takes its precisions one by one.
* Random numbers: the same distributions, other draws; other seeds of trials that train. A trial
  that is scored has the search's own seed in both places.
* `max_concurrent_trials` and `slots_per_trial` are a cluster's: here it is `--workers`, and every
  trial is one process. Fewer trials at a time means that early stopping has seen others when it
  decides: `adaptive_asha` is asynchronous, and depends on who comes first there, too.
* One bracket of `adaptive_asha` fills up after the other; they do not compare with each other.
* The platform keeps replacing invalid trials; here at most as many as the search has trials.
* Three trials in a row that fail for the same reason end the search. In a comparison, which goes by
  turns, these are of two precisions at least: one that always fails is a result.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

from determined_amp.config.overrides import add_override_option

# Imported by the server of the workers. `_dynamo` comes with the first optimizer, tensorboard with
# the first report, scikit-learn with the default data.
_PRELOADED = [
    "determined_amp.search.workers",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "sklearn.datasets",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 when the search completed or was stopped by a signal."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    _start_server()
    # Not before: torch takes seconds to import, here as in the server, which does it meanwhile.
    from determined_amp.search.engine import run_search  # noqa: PLC0415

    return run_search(options.search, options.resume, options.overrides, options.workers)


def _start_server() -> None:
    """Start the server that workers are forked from; it goes on importing in the background.

    Importing torch and what it brings along takes 8 s; a process forked from a server that has done
    so starts in 0.3 s. The server starts no thread and does not initialise CUDA, so forks can. What
    it imports asks whether there is a GPU, as Determined does. torch asks CUDA itself, and no
    process forked from one that did can use a GPU; by this variable it asks the driver instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp search", description="Run a search on this machine."
    )
    parser.add_argument("search", nargs="?", help="search YAML")
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="go on with this search")
    parser.add_argument(
        "--workers", metavar="N", type=_positive, default=1, help="trials at a time"
    )
    add_override_option(parser)
    options = parser.parse_args(arguments)
    if bool(options.search) == bool(options.resume):
        parser.error("give either a search YAML, or --resume FOLDER")
    if options.resume and options.overrides:
        parser.error("--resume goes on with the search as it is: leave --config out")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: an integer >= 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
