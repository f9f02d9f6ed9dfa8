"""A task of a Determined cluster: its experiment, its ranks, its context and its training."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import determined as det
from determined import pytorch

from determined_amp.amp.errors import GuardError
from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.local.context import Prepare, set_averaging
from determined_amp.trial.determined_0_38 import SafeController, controlled_by, task_configuration
from determined_amp.trial.fitting import fit
from determined_amp.trial.notes import show_failure
from determined_amp.trial.unmodified import trial_of


def start_ranks(info: det.ClusterInfo, module: str, *arguments: str) -> None:
    """In a task of several slots, replace this process by Determined's launcher.

    Call it after the configuration was checked, so that mistakes are reported once and without the
    launcher's traceback. In a process that a launcher has started, it returns.

    Args:
        info: Determined's information on the task.
        module: The module that every rank runs.
        arguments: Its arguments.
    """
    single = len(info.slot_ids) < 2 and len(info.container_addrs) < 2
    if single or "RANK" in os.environ:
        return
    rank = [sys.executable, "-m", module, *arguments]
    launcher = [sys.executable, "-m", "determined.launch.torch_distributed"]
    os.execv(sys.executable, [*launcher, *rank])  # noqa: S606


def parse_task(info: det.ClusterInfo, trial: str | None) -> Experiment[Any]:
    """The experiment of this cluster task."""
    return parse(
        task_configuration(info),
        "experiment",
        trial=trial,
        hyperparameters=info.trial.hparams,
    )


def train_on_cluster(
    info: det.ClusterInfo, prepare: Prepare | None = None, trial: str | None = None
) -> int:
    """Train the trial of this cluster task.

    Args:
        info: Determined's information on the task, with configuration and hyperparameters.
        prepare: Called before the trial is made.
        trial: `module:Class`, if the configuration does not name it.

    Returns:
        The exit status, 0.
    """
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    config = parse_task(info, trial)
    hparams = dict(config.hyperparameters)
    frequency = config.aggregation_frequency
    with task_context(hparams, frequency) as context:
        set_averaging(context, config)
        if prepare is not None:
            prepare(context, config)
        made = trial_of(config, context)
        with controlled_by(SafeController):
            fit(made, context)
    return 0


@contextmanager
def task_context(
    hparams: dict[str, Any], aggregation_frequency: int
) -> Iterator[pytorch.PyTorchTrialContext]:
    """Determined's context of a task; if the trial no longer trains, it reports why.

    Determined drops the text of an `InvalidHP`. This writes it to the overview and the metadata of
    the run, and to the last line of its log.
    """
    try:
        with pytorch.init(hparams=hparams, aggregation_frequency=aggregation_frequency) as context:
            try:
                yield context
            except (det.InvalidHP, GuardError) as error:
                show_failure(context, str(error))
                raise
    except SystemExit as left:
        if isinstance(left.__context__, det.InvalidHP):
            # To stderr, like Determined's own lines: otherwise they may follow it in the log.
            print(f"invalid trial: {left.__context__}", file=sys.stderr, flush=True)
        raise
