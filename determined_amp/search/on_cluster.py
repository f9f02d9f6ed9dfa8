"""What the two entrypoints of a search share on a Determined cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import determined as det

from determined_amp.search.trial_config import chosen_seed, compose
from determined_amp.train import exit_status


def run(trial: Callable[[det.ClusterInfo], int]) -> int:
    """Let `trial` run one trial of a search; the exit status."""
    info = det.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        print(
            "this runs on a cluster only; without one: python -m determined_amp search SEARCH.yaml",
            file=sys.stderr,
        )
        return 2

    def composed() -> int:
        _compose(info)
        return trial(info)

    return exit_status(composed)


def _compose(info: det.ClusterInfo) -> None:
    """Put the experiment of this trial where Determined's harness, too, looks for it.

    It reads batch size, searcher and, for its checkpoints, the whole configuration from here; a
    checkpoint then holds an experiment that trains without its search.
    """
    config = compose(info.trial._config, info.trial.hparams, Path.cwd())
    seed = chosen_seed(info.trial.hparams)
    if seed is not None:
        info.trial.trial_seed = seed
    info.trial._config = config
    info.trial.hparams = config["hyperparameters"]
