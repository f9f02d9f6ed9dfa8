"""Train one experiment: on a Determined cluster when run there, on this machine otherwise.

    python -m determined_amp train CONFIG.yaml [--trial module:Class] [--config KEY=VALUE ...]
                                   [--run-folder FOLDER]
    python -m determined_amp train [CONFIG.yaml] --resume RUN_FOLDER
    python -m determined_amp train CONFIG.yaml --report-to MASTER_URL
    torchrun --nproc-per-node 2 -m determined_amp train CONFIG.yaml

It trains any `PyTorchTrial`, from YAMLs of our form and of Determined's own. On a cluster it is the
entrypoint, and takes no argument but `--trial`, for a configuration that does not name the trial.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import determined as det
from determined import pytorch

from determined_amp.amp.checkpoint import SafeController, controlled_by
from determined_amp.config import experiment
from determined_amp.config.overrides import (
    add_override_option,
    add_trial_option,
    with_overrides,
)
from determined_amp.config.plan import value_at
from determined_amp.config.settings import ConfigError
from determined_amp.fitting import fit
from determined_amp.local.checkpoints import complete_checkpoints
from determined_amp.local.context import Prepare, with_averaging
from determined_amp.local.detached import DetachedTrial
from determined_amp.local.folder import RunFolder
from determined_amp.local.master import log_in
from determined_amp.local.run import Resume
from determined_amp.local.run import train as train_here

_SEARCHES = ("random", "grid", "adaptive_asha", "async_halving")


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 when the training completed or was stopped by a signal.

    Raises:
        UserError: if a user can put right what is wrong.
    """
    info = det.get_cluster_info()
    if info is not None and info.task_type == "TRIAL":
        trial = _cluster_parser().parse_args(arguments).trial
        return train_on_cluster(info, trial=trial)
    return _train_on_this_machine(arguments)


def train_on_cluster(
    info: det.ClusterInfo, prepare: Prepare | None = None, trial: str | None = None
) -> int:
    """Train the trial that this task of a cluster is for.

    Args:
        info: Says which; its configuration and hyperparameters are the experiment.
        prepare: Called before the trial is made.
        trial: `module:Class`, if the configuration does not name it.
    """
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    config = experiment.parse(
        info.trial._config,
        "experiment",
        trial=trial,
        hyperparameters=info.trial.hparams,
        completed_by_master=True,
    )
    hparams = dict(config.hyperparameters)
    frequency = config.aggregation_frequency
    with pytorch.init(hparams=hparams, aggregation_frequency=frequency) as context:
        with_averaging(context, config)
        if prepare is not None:
            prepare(context, config)
        made = config.make(context)
        with controlled_by(SafeController):
            fit(made, context)
    return 0


def _train_on_this_machine(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    path = options.config or os.path.join(options.resume, "config.yaml")
    raw = with_overrides(experiment.read_yaml(path), options.overrides)
    _refuse_search(raw, path)
    config = experiment.parse(raw, path, trial=options.trial)
    resume = Resume.latest(Path(options.resume)) if options.resume else None
    chief = os.environ.get("RANK", "0") == "0"
    session = log_in(options.report_to) if options.report_to and chief else None

    def choose_folder() -> RunFolder:
        if options.resume:
            return RunFolder(Path(options.resume))
        if not options.run_folder:
            return RunFolder.new(Path("runs"), config.name)
        if complete_checkpoints(Path(options.run_folder) / "checkpoints"):
            raise ConfigError(
                "--run-folder",
                [
                    f"{options.run_folder} holds a run already, whose checkpoints would mix with "
                    f"the new ones; allowed: another folder, or --resume {options.run_folder}"
                ],
            )
        return RunFolder(Path(options.run_folder))

    listeners = [DetachedTrial(session, config.config)] if session is not None else []
    train_here(config, choose_folder, resume, listeners=listeners)
    return 0


def _refuse_search(config: Mapping[str, Any], source: str) -> None:
    """Raise if the configuration is one of a search, of which no single trial is to be trained."""
    method = value_at(config, "searcher.name")
    hyperparameters = config.get("hyperparameters")
    if method not in _SEARCHES or not isinstance(hyperparameters, Mapping):
        return
    # One trial of a search, with a value for everything, can be trained again.
    if "experiment" in hyperparameters or any(experiment.ranges(hyperparameters)):
        raise ConfigError(
            source,
            [
                f"searcher.name: got {method}, and there are ranges to search; allowed: python -m "
                f"determined_amp search {source}; or searcher.name: single and one value for "
                "every hyperparameter"
            ],
        )


def _cluster_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp train",
        description="Train the trial of this task; everything else is in its configuration.",
    )
    add_trial_option(parser)
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m determined_amp train", description="Train one experiment on this machine."
    )
    parser.add_argument("config", nargs="?", help="experiment YAML")
    parser.add_argument("--resume", metavar="RUN_FOLDER", help="go on from its newest checkpoint")
    parser.add_argument("--run-folder", metavar="FOLDER", help="instead of runs/NAME/TIME")
    parser.add_argument(
        "--report-to",
        metavar="MASTER_URL",
        help="show the run on a Determined cluster, too; log in there with `det user login`",
    )
    add_trial_option(parser)
    add_override_option(parser)
    return parser


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not (options.config or options.resume):
        parser.error("give an experiment YAML, or --resume RUN_FOLDER")
    if options.resume and options.run_folder:
        parser.error("--resume goes on in its own folder: leave --run-folder out")
    return options
