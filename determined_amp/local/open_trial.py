"""Makes a trial for an audit or a measurement: in one process, without a run folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined import core, pytorch

from determined_amp.experiment.errors import faults_of_the_trial
from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.local.checkpoint_storage import LocalCheckpoints
from determined_amp.local.context import trial_context
from determined_amp.local.run import Resume
from determined_amp.trial.checkpoint import CheckpointError
from determined_amp.trial.unmodified import trial_of


@dataclass(frozen=True)
class OpenTrial:
    """A trial that has not trained yet."""

    trial: pytorch.PyTorchTrial
    context: pytorch.PyTorchTrialContext
    latest_checkpoint: str | None  # the argument for `Trainer.fit`; None without a checkpoint
    experiment: Experiment[Any]


@contextmanager
def open_trial(
    config: Mapping[str, Any], source: str, trial: str | None = None, checkpoint: Path | None = None
) -> Iterator[OpenTrial]:
    """Make the trial that an experiment configuration names, in one process on this machine.

    Args:
        config: The experiment configuration.
        source: Where it comes from, for the error message.
        trial: `module:Class`, if the configuration does not name it.
        checkpoint: A checkpoint to start from, or a run folder, whose newest checkpoint is used.

    Raises:
        ConfigError: if the configuration is wrong or names no trial.
        CheckpointError: if there is no checkpoint.
    """
    experiment = parse(config, source, trial=trial)
    folder = None if checkpoint is None else _checkpoint_folder(checkpoint)
    parent, name = (None, None) if folder is None else (folder.parent, folder.name)
    with throwaway_core_context(parent) as core_context:
        context = trial_context(core_context, experiment)
        with faults_of_the_trial():
            yield OpenTrial(trial_of(experiment, context), context, name, experiment)


@contextmanager
def throwaway_core_context(
    checkpoints: Path | None = None, reports: type[core.DummyTrainContext] = core.DummyTrainContext
) -> Iterator[core.Context]:
    """A core context of one process, with temporary files only.

    Args:
        checkpoints: Folder to restore checkpoints from.
        reports: Class that takes the reports.
    """
    processes = core.DummyDistributedContext()
    with tempfile.TemporaryDirectory() as folder:
        core_context = core.Context(
            checkpoint=LocalCheckpoints(processes, checkpoints or Path(folder), None),
            distributed=processes,
            train=reports(Path(folder)),
        )
        with core_context:
            yield core_context


def _checkpoint_folder(path: Path) -> Path:
    if (path / "state_dict.pth").exists():
        return path.absolute()
    if (path / "checkpoints").is_dir():
        return (path / "checkpoints" / Resume.latest(path).checkpoint).absolute()
    raise CheckpointError(
        f"{path}: got neither a checkpoint (a folder with state_dict.pth) nor a run folder"
    )
