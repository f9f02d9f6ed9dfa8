"""Train one experiment on this machine, in Determined's own loop, with no cluster."""

from __future__ import annotations

import dataclasses
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import core, pytorch, util
from determined.common import detignore
from rich.console import Console

from determined_amp.amp.checkpoint import CheckpointError, SafeController, controlled_by, patched
from determined_amp.config.experiment import (
    CheckpointPolicy,
    Experiment,
    indivisible_batch,
    load_trial_class,
)
from determined_amp.config.hparams import Hparams
from determined_amp.config.settings import ConfigError
from determined_amp.fit import Prepare, fit, prepare_nothing
from determined_amp.local.checkpoints import LocalCheckpoints, complete_checkpoints, read_metadata
from determined_amp.local.display import Display
from determined_amp.local.folder import RunFolder
from determined_amp.local.logs import logging_to
from determined_amp.local.processes import StopOnSignal, process_group
from determined_amp.local.reports import Follower, LocalReports


@dataclasses.dataclass(frozen=True)
class Resume:
    """Where a run goes on.

    Args:
        checkpoint: Name of the checkpoint in the run folder.
        batches: Batches trained before it.
    """

    checkpoint: str
    batches: int

    @staticmethod
    def latest(folder: Path) -> Resume:
        """The newest checkpoint of a run folder.

        Raises:
            CheckpointError: if there is none.
        """
        saved = complete_checkpoints(folder / "checkpoints")
        if not saved:
            raise CheckpointError(
                f"{folder}: no checkpoint to resume from; start a new run instead"
            )
        return Resume(saved[-1].name, int(read_metadata(saved[-1])["steps_completed"]))


class LocalController(SafeController):
    """Determined's loop with what it leaves out off a cluster.

    `Trainer.fit` sets `steps_completed` to 0 and forgets the searcher's metric without a master, so
    a resumed run would replay data from the first batch and overshoot its length. It also copies
    the whole working directory into every checkpoint; this copies the trials only.

    Args:
        experiment: Gives the metric that ranks checkpoints.
        display: Is told how long the run is.
        first_batch: Batches trained before this process.
        fitted: What `Trainer.fit` passes.
    """

    def __init__(
        self, experiment: Experiment[Hparams], display: Display, first_batch: int, **fitted: Any
    ) -> None:
        fitted["steps_completed"] = first_batch
        fitted["searcher_metric_name"] = experiment.platform.searcher.metric
        fitted["smaller_is_better"] = experiment.platform.searcher.smaller_is_better
        fitted["checkpoint_policy"] = experiment.platform.checkpoint_policy.value
        super().__init__(**fitted)
        self._length = experiment.hparams.training.max_length
        self._display = display

    def _run(self) -> None:
        assert self.context._epoch_len is not None
        total = self._length.in_batches(self.context._epoch_len)
        with self._display.bar(self.start_from_batch, total):
            super()._run()

    def _save(self, path: Path) -> None:
        with patched(util, "write_user_code", _copy_user_code):
            super()._save(path)


def train(
    config: Mapping[str, Any],
    experiment: Experiment[Hparams],
    choose_folder: Callable[[], RunFolder],
    resume: Resume | None,
    *,
    follow: Callable[[RunFolder], Follower] = lambda folder: Follower(),
    show: Callable[[StopOnSignal], Display] | None = None,
    prepare: Prepare = prepare_nothing,
) -> RunFolder:
    """Train, or go on training, until the end or until a signal asks to stop.

    Args:
        config: The configuration as it was given.
        experiment: The same, parsed.
        choose_folder: Makes or names the run folder; called by the chief only.
        resume: Where to go on from.
        follow: Makes what is told of everything the folder receives; called by the chief only.
        show: Makes what is told of the run, and may ask it to stop; by default the terminal.
        prepare: Called before the trial is made.

    Returns:
        The run folder.

    Raises:
        CheckpointError: if the checkpoint to resume from does not fit, or one cannot be saved.
        ConfigError: if the batch does not divide among the processes.
        PrecisionError: if the device only emulates the precision.
    """
    first_batch = resume.batches if resume else 0
    with process_group() as processes, StopOnSignal(processes).listening() as stop:
        chief = processes.rank == 0
        folder = RunFolder(processes.broadcast(choose_folder().path if chief else None))
        display = Display(experiment.name, Console(quiet=not chief))
        if show is not None:
            display = show(stop)
        reports, follower = None, Follower()
        if chief:
            folder.forget_metrics_after(first_batch)
            folder.describe(config, experiment)
            follower = follow(folder)
            reports = LocalReports(folder, display, experiment, follower)
        core_context = core.Context(
            checkpoint=LocalCheckpoints(processes, folder.checkpoints, reports),
            distributed=processes,
            preempt=stop,
            train=reports or core.DummyTrainContext(folder.tensorboard),
        )
        followed = follower.following(lambda: stop.requested)
        with logging_to(folder.log, display.console), core_context, followed:
            context = trial_context(core_context, config, experiment, first_batch)
            prepare(context, experiment)
            trial = load_trial_class(experiment.hparams.trial)(context, experiment)
            with controlled_by(partial(LocalController, experiment, display, first_batch)):
                start = resume.checkpoint if resume else None
                # The controller puts the experiment's policy back; `Trainer` refuses `best` here.
                fit(trial, context, experiment, start, CheckpointPolicy.ALL)
        display.close("stopped, can be resumed" if stop.requested else "completed", folder.path)
        return folder


def trial_context(
    core_context: core.Context,
    config: Mapping[str, Any],
    experiment: Experiment[Hparams],
    first_batch: int,
) -> pytorch.PyTorchTrialContext:
    """What `pytorch.init` makes on a cluster, seeds included."""
    processes = core_context.distributed
    wrong = list(indivisible_batch(experiment.hparams.global_batch_size, processes.size))
    if wrong:
        raise ConfigError(experiment.name, wrong)
    for set_seed in (random.seed, np.random.seed, torch.random.manual_seed):
        set_seed(experiment.seed)
    return pytorch.PyTorchTrialContext(
        core_context=core_context,
        trial_seed=experiment.seed,
        hparams=dict(config["hyperparameters"]),
        slots_per_trial=processes.size,
        num_gpus=torch.cuda.device_count(),  # Determined would count those of nvidia-smi
        exp_conf=dict(config),
        aggregation_frequency=experiment.hparams.aggregation_frequency,
        steps_completed=first_batch,
        managed_training=True,
        debug_enabled=False,
    )


def _copy_user_code(path: Path, on_cluster: bool) -> None:
    """The code that `determined.pytorch.load_trial_from_checkpoint_path` needs.

    It is the Python files of whatever was imported from the working directory: of a package all of
    them, for what is imported later. What a `.detignore` there names stays behind, as do data,
    environments and installed packages.
    """
    here = Path.cwd()
    files = (getattr(module, "__file__", None) or "/" for module in list(sys.modules.values()))
    ours = {Path(file).relative_to(here) for file in files if Path(file).is_relative_to(here)}
    tops = {file.parts[0] for file in ours if file.suffix == ".py" and file.name[0] != "."}
    ignored = detignore.make_shutil_ignore(here)

    def no_code(folder: str, names: list[str]) -> set[str]:
        kept = (n for n in names if n.endswith(".py") or (Path(folder) / n).is_dir())
        return {*ignored(folder, names), *(set(names) - {*kept}), "site-packages"}

    for top in tops - no_code(str(here), list(tops)):
        if (here / top).is_file():
            (path / "code").mkdir(exist_ok=True)
            shutil.copyfile(here / top, path / "code" / top)
        elif not (here / top / "pyvenv.cfg").exists():
            shutil.copytree(here / top, path / "code" / top, ignore=no_code)
