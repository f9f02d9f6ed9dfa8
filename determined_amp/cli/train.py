"""The command `train`: train one experiment on this machine, or as a task of a cluster.

It trains any `PyTorchTrial`, from a YAML in our form or in Determined's own. On a
cluster it is the entrypoint. Its only option there is `--trial`, for a configuration
that does not name the trial.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from determined_amp.amp.errors import ConfigError
from determined_amp.cli.options import (
    INTERRUPTED,
    Parser,
    add_trial_options,
    experiment_of,
)
from determined_amp.experiment.failures import is_task

if TYPE_CHECKING:
    from determined_amp.experiment.experiment import Experiment
    from determined_amp.runs.folder import RunFolder


# What the command does, for `--help`.
TEXT = "train an experiment, here or as a task of a cluster"


def add_options(parser: Parser) -> None:
    """Add the options of the command."""
    add_trial_options(parser, needs_config=False)
    if is_task():
        return
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN_FOLDER",
        help="continue a run from its newest checkpoint",
    )
    parser.add_argument(
        "--run-folder", type=Path, metavar="FOLDER", help="default: runs/NAME/TIME"
    )


def run(options: Namespace) -> int:
    """Train until the run completes. Return 130 if a signal stops it, else 0."""
    if is_task():
        from determined_amp.cluster import train_task  # noqa: PLC0415  # torch

        train_task(options.trial, options.words)
        return 0
    if not (options.config or options.resume):
        options.parser.error("give an experiment YAML, or --resume RUN_FOLDER")
    if options.resume and options.run_folder:
        options.parser.error(
            "--resume continues in its own folder: leave --run-folder out"
        )
    if options.resume:
        from determined_amp.runs.folder import RUN_FILE, check_folder  # noqa: PLC0415

        what = "a run folder, runs/NAME/TIME"
        check_folder(options.resume, [RUN_FILE], what)
        options.config = options.config or str(options.resume / "config.yaml")
    return _train_here(options, experiment_of(options))


def _train_here(options: Namespace, experiment: Experiment) -> int:
    # These import torch, which takes seconds.
    from determined_amp.local.checkpoint_storage import Resume  # noqa: PLC0415
    from determined_amp.local.trainer import train  # noqa: PLC0415
    from determined_amp.runs.folder import RunFolder, fresh_folder, lock  # noqa: PLC0415

    resume = Resume.latest(options.resume) if options.resume else Resume()
    given = options.resume or options.run_folder

    def choose_folder() -> RunFolder:
        folder = RunFolder(given or fresh_folder(experiment.name))
        held.enter_context(lock(folder.shown, "this run"))
        kept = folder.not_to_lose
        if kept and not options.resume:
            text = (
                f"{given} holds {kept[0]}; allowed: a new folder, or --resume to go on"
                " with a run"
            )
            raise ConfigError("--run-folder", [text])
        return folder

    with ExitStack() as held:
        stopped = train(experiment, choose_folder, resume)
    return INTERRUPTED if stopped else 0
