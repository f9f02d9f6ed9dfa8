"""Trains one experiment in Determined's own loop, on this machine without a cluster."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from determined import core, util
from torch import nn
from torch.nn.parameter import is_lazy

from determined_amp.amp.errors import UserError
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.tensors import is_finite, numbered
from determined_amp.amp.users_code import is_installed
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.machine import Machine
from determined_amp.experiment.sections import CheckpointPolicy
from determined_amp.local.checkpoint_storage import (
    BestValidation,
    LocalCheckpoints,
    Resume,
    storage_in,
    translating_disk_errors,
)
from determined_amp.local.display import Display
from determined_amp.local.ending import Ending, ending
from determined_amp.local.logs import Terminal, logging_to
from determined_amp.local.open_trial import around_a_trial, trial_context
from determined_amp.local.processes import (
    GoesOn,
    StopOnSignal,
    on_stop_signals,
    process_group,
)
from determined_amp.runs.folder import RunFolder, read_metrics
from determined_amp.runs.run import RunState
from determined_amp.trial.controller import SafeController
from determined_amp.trial.determined_private import (
    LocalTrainContext,
    controlled_by,
    epoch_length,
)
from determined_amp.trial.fitting import fit
from determined_amp.trial.make import precision_of, trial_of_run

logger = logging.getLogger(__name__)


class LocalRun(LocalTrainContext):
    """Records a run in its folder and shows it on the terminal.

    Only the chief has it; the other ranks get a plain `core.DummyTrainContext`. Until
    its training starts, a resume changes only the log and the lock in the folder, and
    removes what a killed process left of a checkpoint that it had not finished. So a
    refused resume leaves the run as it was.

    Args:
        experiment: The experiment that the run trains.
        resume: Where the run begins.
        folder: The folder of the run.
        stop: Stops the run.
        console: The terminal.

    Attributes:
        best: The best validation, also of earlier processes.
    """

    def __init__(
        self,
        experiment: Experiment,
        resume: Resume,
        folder: RunFolder,
        stop: StopOnSignal,
        console: Terminal,
    ) -> None:
        self._experiment, self._folder, self._stop = experiment, folder, stop
        self._resumed = resume.checkpoint != ""
        self._batches = self._total = 0  # until the training starts
        self.display = Display(experiment, console, folder)
        # The trial may leave the directory later, and this records its commit.
        self._machine = Machine.of_this_process(stop.processes.size)
        if not self._resumed:
            folder.forget_metrics_after(0)
            folder.describe(experiment, self._machine)
        super().__init__(tensorboard_path=folder.tensorboard)
        self.best = BestValidation(experiment.platform.searcher)
        for line in read_metrics(folder.metrics):
            # Later batches are trained again.
            if line["group"] == "validation" and line["batches"] <= resume.batches:
                self._note_validation(line["batches"], line)

    def begin_training(
        self, first_batch: int, total_batches: int, epoch_batches: int
    ) -> None:
        """Note that the loop starts, when `first_batch` of all batches are trained
        already.
        """
        self._batches, self._total = first_batch, total_batches
        if self._resumed:
            # This comes first, because it refuses a damaged record.
            run = self._folder.describe(
                self._experiment, self._machine, first_batch=first_batch
            )
            self._folder.forget_metrics_after(first_batch)
            # Reports do not compare a run that a resume has changed.
            for change in replace(run, parts=run.parts[-2:]).changes:
                logger.warning("%s", change)
        self.display.begin_training(first_batch, total_batches)
        self._stop.ask(
            {"group": "start", "batches": first_batch, "epoch_batches": epoch_batches}
        )

    def take_report(self, group: str, batches: int, metrics: Metrics) -> None:
        """Record a report, show it, and ask the search whether to go on."""
        numbers = {name: _number(value) for name, value in metrics.items()}
        line = {**numbers, "group": group, "batches": batches}
        self._folder.append_metrics(line)
        self._batches = batches
        self.display.report(line)
        self._stop.ask(line)
        if group == "validation":
            self._note_validation(batches, numbers)

    def get_experiment_best_validation(self) -> float | None:
        return self.best.value

    def _note_validation(self, batches: int, metrics: Metrics) -> None:
        self.last_validation = batches
        self.best.note(batches, metrics)

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, trace: object
    ) -> None:
        try:
            # A resume that fails before it trains does not change how the run ended.
            if not self._resumed or self._total:
                self._folder.end(*ending(error, self._stopped(error)))
        finally:
            self.display.end(error, stopped=self._stop.obeyed)

    def _stopped(self, error: BaseException | None) -> Ending | None:
        """The ending of this run if it was asked to stop."""
        if self._stop.obeyed or isinstance(error, KeyboardInterrupt):
            return self._stop.asked or (RunState.STOPPED, "asked to stop")
        # In a search, a trial that stops itself has completed.
        if self._batches < self._total and self._stop.goes_on is None:
            return RunState.STOPPED, "the trial asked to stop"
        return None


class LocalController(SafeController):
    """Determined's loop, corrected for runs without a master.

    `Trainer.fit` sets the searcher's metric to None, so no checkpoint would be the
    best. Determined also copies the whole working directory into every checkpoint. This
    class copies the user's code only.

    Args:
        experiment: The experiment, with the metric that ranks checkpoints and the
            length of the whole run.
        directory: Where the run began. The user's code is there.
        fitted: The arguments that `Trainer.fit` gives to the controller.
    """

    def __init__(self, experiment: Experiment, directory: Path, **fitted: Any) -> None:
        searcher = experiment.platform.searcher
        policy = experiment.platform.checkpoint_policy
        # Without a metric, no checkpoint is the best.
        if policy is CheckpointPolicy.BEST and searcher.metric is None:
            policy = CheckpointPolicy.ALL
        fitted |= {
            "searcher_metric_name": searcher.metric,
            "smaller_is_better": searcher.smaller_is_better,
            "checkpoint_policy": policy.value,
        }
        super().__init__(**fitted)
        self._experiment = experiment
        self._directory = directory
        # A mask may be infinite by intent.
        self._never_finite = _not_finite(self.context.models)

    def _set_data_loaders(self) -> None:
        super()._set_data_loaders()
        loader: Any = self.validation_loader
        # Determined would notice this only at the first validation.
        if self.evaluates_batches and hasattr(loader, "__len__") and not len(loader):
            raise UserError(
                "the validation data loader has no batch on this slot; allowed: at "
                "least one batch for every slot"
            )

    def _run(self) -> None:
        epoch = epoch_length(self.context)
        total = self._experiment.max_length.in_batches(epoch)
        if total < self.start_from_batch:
            raise UserError(
                f"{self._experiment.key_of('max_length')}: got {total} batches, and "
                f"{self.start_from_batch} are trained; allowed: at least as many"
            )
        run = self.core_context.train
        if isinstance(run, LocalRun):  # the chief has one
            run.begin_training(self.start_from_batch, total, epoch)
        super()._run()

    def _save(self, path: Path) -> None:
        storage = self.core_context.checkpoint
        assert isinstance(storage, LocalCheckpoints)
        storage.finite = _not_finite(self.context.models) <= self._never_finite
        with patched(
            util, "write_user_code", partial(_copy_user_code, self._directory)
        ):
            super()._save(path)


def train(
    experiment: Experiment,
    choose_folder: Callable[[], RunFolder],
    resume: Resume,
    goes_on: GoesOn | None = None,
) -> bool:
    """Train to the end, or until a signal or a search stops the run.

    Args:
        experiment: The experiment.
        choose_folder: Returns the run folder; only the chief calls it.
        resume: Where the run begins.
        goes_on: Asks a search whether the run goes on. The terminal does not show runs
            of a search.

    Returns:
        Whether the run was stopped, and can be resumed.

    Raises:
        UserError: if the run cannot train. A `DiskError` is no fault of the trial.
    """
    _ = experiment.loaded().max_length  # raises, before a folder is made
    with process_group() as processes:
        stop = StopOnSignal(processes, goes_on)
        is_chief = processes.rank == 0
        folder = processes.broadcast(choose_folder() if is_chief else None)
        console = Terminal(quiet=goes_on is not None or not is_chief)
        log = logging_to(folder.log if is_chief else None, console)
        with log:
            run = None
            if is_chief:
                run = LocalRun(experiment, resume, folder, stop, console)
            _fit(experiment, resume, folder, run, stop)
        return stop.obeyed


def _fit(
    experiment: Experiment,
    resume: Resume,
    folder: RunFolder,
    run: LocalRun | None,
    stop: StopOnSignal,
) -> None:
    """Train in this process. Only the chief has a `run`, which writes the folder."""
    core_context = _core_context(folder, run, stop)
    loop = partial(LocalController, experiment, Path.cwd())
    with (
        on_stop_signals(stop.on_signal),
        core_context,
        run or nullcontext(),
        translating_disk_errors(folder.path),
        around_a_trial(),
        controlled_by(loop),
    ):
        context = trial_context(core_context, experiment, resume.batches)
        trial = trial_of_run(experiment, context)
        if run is not None:
            run.display.show_precision(precision_of(experiment, context))
        # The controller restores the experiment's policy; `Trainer` refuses `best`
        # here.
        policy = CheckpointPolicy.ALL.value
        try:
            fit(
                trial,
                context,
                latest_checkpoint=resume.checkpoint or None,
                checkpoint_policy=policy,
            )
        except SystemExit as left:
            if stop.asked is None:
                raise
            raise KeyboardInterrupt from left


def _core_context(
    folder: RunFolder, run: LocalRun | None, stop: StopOnSignal
) -> core.Context:
    processes, saved = stop.processes, folder.checkpoints
    if run is None:
        checkpoints = core.DummyCheckpointContext(processes, storage_in(saved))
    else:
        checkpoints = LocalCheckpoints(processes, saved, run.best.is_after)
    return core.Context(
        checkpoint=checkpoints,
        distributed=processes,
        preempt=stop,
        train=run or core.DummyTrainContext(folder.tensorboard),
    )


def _not_finite(models: Sequence[nn.Module]) -> set[str]:
    """The names of the parameters and buffers that are not finite. This waits for the
    device.
    """
    names = set()
    for prefix, model in numbered(models):
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if not is_lazy(tensor) and not is_finite(tensor):
                names.add(prefix + name)
    return names


def _copy_user_code(here: Path, path: Path, on_cluster: bool) -> None:
    """Copy the loaded modules below the directory `here`, except installed packages.

    `determined.pytorch.load_trial_from_checkpoint_path` imports them.
    """
    # Compare strings: `Path` objects of thousands of modules would take longer than the
    # copy.
    inside = f"{here}{os.sep}"
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(inside) and file.endswith(".py") and not is_installed(file):
            copy = path / "code" / file.removeprefix(inside)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _number(value: Any) -> Any:
    """A plain number for a numpy scalar; text for anything that is not a number."""
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (int, float)) else str(value)
