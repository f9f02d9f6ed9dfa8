"""The command `train`: train one experiment on this machine, or as a task of a cluster.

It trains any `PyTorchTrial`, from a YAML in our form or in Determined's own. On a
cluster it is the entrypoint. Its only option there is `--trial`, for a configuration
that does not name the trial.
"""

from __future__ import annotations

import os
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.amp.errors import ConfigError
from determined_amp.cli import Arguments
from determined_amp.cli.options import INTERRUPTED, experiment_of, parser_of
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.failures import is_task

if TYPE_CHECKING:
    from determined_amp.runs.folder import RunFolder


def main(arguments: Arguments) -> int:
    """Train until the run has completed, or a signal stops it; then the status is
    130.
    """
    if is_task():
        trial = (
            parser_of("train", "Train the trial of this task.")
            .parse_args(arguments)
            .trial
        )
        from determined_amp.cluster import train_task  # noqa: PLC0415  # torch

        train_task(trial, arguments)
        return 0
    options = _options(arguments)
    options.config = options.config or os.path.join(options.resume, "config.yaml")
    return _train_here(options, experiment_of(options))


def _train_here(options: Namespace, experiment: Experiment) -> int:
    # These import torch, which takes seconds.
    from determined_amp.local.checkpoint_storage import (  # noqa: PLC0415
        Resume,
        complete_checkpoints,
    )
    from determined_amp.local.trainer import train  # noqa: PLC0415
    from determined_amp.runs.folder import RunFolder, fresh_folder  # noqa: PLC0415

    experiment = experiment.with_trial()
    resume = Resume.latest(Path(options.resume)) if options.resume else None
    given = options.resume or options.run_folder

    def choose_folder() -> RunFolder:
        folder = RunFolder(
            Path(given) if given else fresh_folder(Path("runs"), experiment.name)
        )
        held.enter_context(folder.locked())
        taken = folder.foreign or [
            saved.name for saved in complete_checkpoints(folder.checkpoints)
        ]
        if resume is None and taken:
            text = (
                f"{given} holds {taken[0]}; allowed: a new folder, or --resume to go on"
                " with a run"
            )
            raise ConfigError("--run-folder", [text])
        return folder

    with ExitStack() as held:
        stopped = train(experiment, choose_folder, resume)
    return INTERRUPTED if stopped else 0


def _options(arguments: Arguments) -> Namespace:
    parser = parser_of(
        "train", "Train one experiment on this machine.", needs_config=False
    )
    parser.add_argument(
        "--resume",
        metavar="RUN_FOLDER",
        help="continue a run from its newest checkpoint",
    )
    parser.add_argument(
        "--run-folder", metavar="FOLDER", help="default: runs/NAME/TIME"
    )
    options = parser.parse_args(arguments)
    if not (options.config or options.resume):
        parser.error("give an experiment YAML, or --resume RUN_FOLDER")
    if options.resume and options.run_folder:
        parser.error("--resume continues in its own folder: leave --run-folder out")
    return options
