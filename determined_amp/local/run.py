"""Train one experiment on this machine, in Determined's own loop, with no cluster."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from determined import core, util
from determined.common import detignore
from rich.console import Console

from determined_amp.amp.checkpoint import (
    CheckpointError,
    PortableCheckpoint,
    SafeController,
    controlled_by,
    patched,
)
from determined_amp.config.errors import UserError
from determined_amp.config.experiment import CheckpointPolicy, Experiment
from determined_amp.config.settings import ConfigError
from determined_amp.config.training import Length
from determined_amp.fitting import fit
from determined_amp.local.checkpoints import LocalCheckpoints, complete_checkpoints, read_metadata
from determined_amp.local.context import Prepare, trial_context
from determined_amp.local.display import Display
from determined_amp.local.folder import End, RunFolder
from determined_amp.local.logs import logging_to
from determined_amp.local.processes import StopOnSignal, process_group
from determined_amp.local.reports import LocalReports, RunListener

logger = logging.getLogger(__name__)


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


class EndRecorder(RunListener):
    """Records in the run folder how the run ended, unless the process is killed.

    Args:
        batches: Trained before this process.
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._total: int | None = None  # before the training begins

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        self._folder, self._stop = folder, stop

    def on_training(self, start: int, total: int) -> None:
        self._total = total
        self._folder.forget_end()

    def on_report(self, line: Mapping[str, Any]) -> None:
        self._batches = line["batches"]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records how this block ends, before any other listener hears of it and may fail."""
        try:
            yield
        except BaseException as error:
            # A resume that fails before it trains leaves the run, and its record, as they were.
            if self._total is not None or not self._folder.end.exists():
                self._record(*self._after(error))
            raise
        if self._stop.obeyed:
            self._record("stopped", self._stop.reason)
        elif self._total is not None and self._batches < self._total:
            self._record("stopped", "the trial asked to stop")
        else:
            self._record("completed", "")

    def _after(self, error: BaseException) -> tuple[str, str]:
        if isinstance(error, KeyboardInterrupt):
            return "stopped", self._stop.reason
        if isinstance(error, SystemExit):  # of the worker of a search that is gone
            return "stopped", str(error)
        if isinstance(error, UserError):
            return "failed", str(error)
        return "failed", ": ".join([type(error).__name__, *str(error).splitlines()[:1]])

    def _record(self, state: str, reason: str) -> None:
        try:
            self._folder.record_end(End(state, reason, self._batches))
        except OSError as lost:  # the disk may be full, and the run have failed by that
            logger.warning("%s: how the run ended is not recorded: %s", self._folder.path, lost)


class LocalController(SafeController):
    """Determined's loop with what it leaves out off a cluster.

    `Trainer.fit` sets `steps_completed` to 0 and forgets the searcher's metric without a master, so
    a resumed run would replay data from the first batch and overshoot its length. It also copies
    the whole working directory into every checkpoint; this copies the user's code only. And it
    saves numpy's random state as an array, which no torch since 2.6 loads without being told to;
    this saves plain types.

    Args:
        experiment: Gives the metric that ranks checkpoints.
        length: Of the whole run.
        listeners: Are told it.
        first_batch: Batches trained before this process.
        fitted: What `Trainer.fit` passes.
    """

    def __init__(
        self,
        experiment: Experiment[Any],
        length: Length,
        listeners: Sequence[RunListener],
        first_batch: int,
        **fitted: Any,
    ) -> None:
        fitted["steps_completed"] = first_batch
        searcher = experiment.platform.searcher
        fitted["searcher_metric_name"] = searcher.metric
        fitted["smaller_is_better"] = searcher.smaller_is_better
        fitted["checkpoint_policy"] = _policy(experiment).value
        super().__init__(**fitted)
        self._metric = searcher.metric
        self._length = length
        self._listeners = listeners

    def _run(self) -> None:
        assert self.context._epoch_len is not None
        total = self._length.in_batches(self.context._epoch_len)
        for listener in self._listeners:
            listener.on_training(self.start_from_batch, total)
        super()._run()

    def _check_searcher_metric(self, val_metrics: dict[str, Any]) -> Any:
        if self._metric not in val_metrics:
            numbers = (name for name, x in val_metrics.items() if util.is_numerical_scalar(x))
            raise ConfigError(
                "experiment",
                [
                    f"searcher.metric: got {self._metric}, which the trial does not report; "
                    f"allowed: {', '.join(sorted(numbers))}, or no metric, and then no checkpoint "
                    "is the best"
                ],
            )
        return super()._check_searcher_metric(val_metrics)

    def _save(self, path: Path) -> None:
        with patched(util, "write_user_code", _copy_user_code), self._portable():
            super()._save(path)

    @contextmanager
    def _portable(self) -> Iterator[None]:
        """Inside this block checkpoints hold plain types only, whatever the trial does."""
        save = torch.save

        def save_plain(checkpoint: Any, *others: Any, **named: Any) -> None:
            if isinstance(checkpoint, dict) and "rng_state" in checkpoint:
                PortableCheckpoint().on_checkpoint_save_start(checkpoint)
            save(checkpoint, *others, **named)

        with patched(torch, "save", save_plain):
            yield


def train(
    experiment: Experiment[Any],
    choose_folder: Callable[[], RunFolder],
    resume: Resume | None,
    *,
    listeners: Sequence[RunListener] = (),
    show: bool = True,
    prepare: Prepare | None = None,
) -> RunFolder:
    """Train, or go on training, until the end or until a signal asks to stop.

    Args:
        experiment: What to train.
        choose_folder: Makes or names the run folder; called by the chief only.
        resume: Where to go on from.
        listeners: Are told what happens to the run, by the chief only.
        show: Whether the terminal shows the run.
        prepare: Called before the trial is made.

    Returns:
        The run folder.

    Raises:
        CheckpointError: if the checkpoint to resume from does not fit, or one cannot be saved.
        ConfigError: if the batch does not divide among the processes, or there is no length.
        PrecisionError: if the device only emulates the precision.
    """
    first_batch = resume.batches if resume else 0
    length = experiment.max_length
    with process_group() as processes, StopOnSignal(processes).listening() as stop:
        chief = processes.rank == 0
        folder = RunFolder(processes.broadcast(choose_folder().path if chief else None))
        console = Console(quiet=not (chief and show))
        metric = experiment.platform.searcher.metric
        display = [Display(experiment.name, console, metric)] if show else []
        recorder = EndRecorder(first_batch)
        told = [recorder, *display, *listeners] if chief else []
        reports = None
        if chief:
            folder.forget_metrics_after(first_batch)
            folder.describe(experiment)
            reports = LocalReports(folder, experiment, told)
        core_context = core.Context(
            checkpoint=LocalCheckpoints(processes, folder.checkpoints, reports),
            distributed=processes,
            preempt=stop,
            train=reports or core.DummyTrainContext(folder.tensorboard),
        )
        logged = logging_to(folder.log if chief else None, console)
        recorded = recorder.recording() if chief else nullcontext()
        with logged, core_context, _tell(told, folder, stop), recorded:
            context = trial_context(core_context, experiment, first_batch)
            if prepare is not None:
                prepare(context, experiment)
            trial = experiment.make(context)
            with controlled_by(partial(LocalController, experiment, length, told, first_batch)):
                start = resume.checkpoint if resume else None
                # The controller puts the experiment's policy back; `Trainer` refuses `best` here.
                policy = CheckpointPolicy.ALL.value
                fit(trial, context, latest_checkpoint=start, checkpoint_policy=policy)
        return folder


@contextmanager
def _tell(
    listeners: Sequence[RunListener], folder: RunFolder, stop: StopOnSignal
) -> Iterator[None]:
    """Tell listeners of start and end; the first to start is the last to end."""

    def end(
        listener: RunListener, kind: object, error: BaseException | None, trace: object
    ) -> None:
        listener.on_end(error, stopped=stop.obeyed)

    with ExitStack() as started:
        for listener in listeners:
            listener.on_start(folder, stop)
            started.push(partial(end, listener))
        yield


def _policy(experiment: Experiment[Any]) -> CheckpointPolicy:
    """Of the experiment; without a metric none is the best, and all are saved."""
    policy = experiment.platform.checkpoint_policy
    ranks = experiment.platform.searcher.metric is not None
    return policy if ranks or policy is not CheckpointPolicy.BEST else CheckpointPolicy.ALL


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
