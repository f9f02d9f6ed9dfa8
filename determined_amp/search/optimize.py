"""Runs a search without a cluster: `Study.optimize`, with each trial in a process of its own."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
from rich.console import Console

from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.local.processes import on_stop_signals
from determined_amp.runs.folder import (
    FolderError,
    RunFolder,
    fresh_folder,
    lock,
    read_record,
    read_run,
    trial_folder,
)
from determined_amp.runs.run import Run, RunState
from determined_amp.search.search_display import SearchDisplay, minutes
from determined_amp.search.search_folder import (
    read_config,
    read_search,
    result,
    workers_of,
    write_config,
)
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study import StudyError, create_study, open_trials, storing
from determined_amp.search.trial_process import Job, TrialProcess, TrialResult

# Seconds that a trial gets to save a checkpoint when the time is up; then it is killed.
GRACE = 15.0

# A trial that ended so is not run again.
_ENDED = (RunState.COMPLETED, RunState.PRUNED)

# What `run_comparison` returns after a signal.
INTERRUPTED = "when it was interrupted"


class SearchError(UserError):
    """The search cannot continue."""


class FailedTrialError(Exception):
    """A trial has no result. Optuna records it as failed, and goes on with the next."""


class OpenTrialError(BaseException):
    """Ends `Study.optimize`, which takes only an `Exception` as the end of a trial.

    So the trial stays open, as after a kill, and a resume of the search continues it.
    """


def run_search(folder: Path, workers: int) -> int:
    """Run all trials of the search in a folder that have not ended.

    Args:
        folder: The folder; `new_search` makes one.
        workers: Number of trials that run at the same time.

    Returns:
        The exit status. 0: the search completed. 1: a trial failed, but others did not.
        Hyperparameters that cannot train are a result, not a failure. 130: a signal stopped it.

    Raises:
        UserError: if it cannot continue, or no trial has a result.
    """
    plan = SearchPlan(read_config(folder))
    display = SearchDisplay(Console(), plan, folder)
    before = workers_of(plan.search)
    if plan.compares and workers != before:
        raise SearchError(
            f"--workers: got {workers}, but this comparison began with {before}, and speed depends "
            f"on it; allowed: {before}"
        )
    if plan.compares and workers > 1:
        display.warn_of_sharing(workers)
    stopped = _optimize(folder, plan, display, workers).stopping
    ended = read_search(folder)
    empty = not stopped and not ended.ranked()
    display.close(ended, stopped=stopped, failed=empty)
    if empty:
        reasons = (f"trial {run.number}: {run.reason}" for run in ended.runs[:1])
        raise SearchError(f"no trial of {len(ended.runs)} has a result; {''.join(reasons)}")
    if stopped:
        return 130
    return 1 if ended.failed() else 0


def new_search(config: Mapping[str, Any], source: str, workers: int) -> Path:
    """The folder of a new search, after what its trial says of the YAML.

    Args:
        config: The search, checked by `check_search`.
        source: Where it comes from, for the error message.
        workers: Number of trials that run at the same time.
    """
    try:
        SearchPlan(config).check_trial()
    except ConfigError as error:
        raise ConfigError(source, error.problems) from error
    folder = fresh_folder(Path("runs"), str(config.get("name", "search")))
    try:
        with storing(folder):
            create_study(folder, write_config(folder, config, workers))
    except (OSError, StudyError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise FolderError(f"{folder}: cannot be written: {error}") from error
    return folder


def run_comparison(folder: Path, search: Mapping[str, Any], time_limit: float) -> str:
    """Run the trials of a new comparison in its folder, one at a time.

    After `time_limit` seconds it stops as if by a signal.

    Returns:
        When or why it ended before its last trial, such as "within 3 min"; else an empty text.
    """
    plan = SearchPlan(write_config(folder, search, workers=1))
    create_study(folder, search)
    objective = _optimize(folder, plan, SearchDisplay(Console(), plan, folder), 1, time_limit)
    if objective.time_is_up:
        return f"within {minutes(time_limit)}"
    return INTERRUPTED if objective.stopping else ""


def _optimize(
    folder: Path,
    plan: SearchPlan,
    display: SearchDisplay,
    workers: int,
    time_limit: float | None = None,
) -> Objective:
    """Run all trials of the search in a folder."""
    with lock(folder, "this search"), storing(folder):
        if workers > workers_of(plan.search):  # from now on the speeds of its trials do not count
            write_config(folder, plan.search, workers)
        study, waiting = open_trials(folder, plan)
        objective = Objective(plan, folder, display, workers)
        with (
            on_stop_signals(objective.on_signal),
            objective.limited_to(time_limit),
            suppress(OpenTrialError),
        ):
            study.optimize(objective, n_trials=waiting, n_jobs=workers, catch=FailedTrialError)
        if objective.fault is not None:
            raise objective.fault
    return objective


class Objective:
    """Runs a trial in a process of its own, and returns the value of its metric.

    Optuna calls it in one thread for each trial that runs at the same time. The first SIGINT or
    SIGTERM stops every trial at its next report, with a checkpoint; a second one ends them at once.

    Attributes:
        fault: The error that stopped the search, such as a full disk; else None.
        time_is_up: Whether the time limit stopped it.
    """

    def __init__(
        self, plan: SearchPlan, folder: Path, display: SearchDisplay, workers: int
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._display = display
        self._workers = workers
        # Processes are started and joined one at a time: multiprocessing looks at all of them.
        self._lock = threading.Lock()
        self._running: list[TrialProcess] = []
        self.fault: Exception | None = None
        self.time_is_up = False
        self._signals = 0

    @property
    def stopping(self) -> bool:
        """Whether a signal, the time limit or the machine asked to stop."""
        return self._signals > 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT and SIGTERM by stopping the trials."""
        self._stop()

    @contextmanager
    def limited_to(self, seconds: float | None) -> Iterator[None]:
        """Stop the trials after this time inside this block, and kill them `GRACE` later."""
        if seconds is None:
            yield
            return
        timers = [threading.Timer(seconds + wait, self._stop_in_time) for wait in (0.0, GRACE)]
        for timer in timers:
            timer.start()
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def __call__(self, trial: optuna.Trial) -> float:
        """Run a trial to its end.

        Raises:
            FailedTrialError: if it has no result.
            OpenTrialError: if it was interrupted, and continues with a resume.
        """
        try:
            run = self._run(trial.number)
        except Exception as error:  # of a file, not of the trial
            self.fault = error
            self._stop()
            raise OpenTrialError from error
        self._display.ended(run)
        value = result(run, self._plan.settings.metric)
        if run.state is RunState.PRUNED:
            raise optuna.TrialPruned
        if value is None:
            raise FailedTrialError(run.reason)
        return value

    def _run(self, number: int) -> Run:
        """Run a trial; one whose process dies continues, as often as `max_restarts` says."""
        if self.stopping:
            raise OpenTrialError
        folder, metric = RunFolder(trial_folder(self._folder, number)), self._plan.settings.metric
        if folder.record.exists() and read_record(folder.path).state in _ENDED:
            return read_run(folder.path)  # a killed search could not tell the study
        config, hparams = self._plan.trial(number)
        folder.describe_trial(number, hparams)
        job = Job(self._plan.task, config, folder.path, self._folder, number)
        for _ in range(self._plan.max_restarts + 1):
            ended, status = self._in_a_process(job)
            if ended is not None:
                folder.end(ended.state, ended.reason or "")
                break
            self._display.lost(number, status)
        else:
            times = self._plan.max_restarts + 1
            died = f"its process died {times} times, the last time with status {status}"
            folder.end(RunState.FAILED, died)
        run = read_run(folder.path)
        if run.state is RunState.COMPLETED and result(run, metric) is None:
            folder.end(RunState.FAILED, f"{metric} was not reported")
            run = read_run(folder.path)
        return run

    def _in_a_process(self, job: Job) -> tuple[TrialResult | None, int | None]:
        """The result of a job, None if its process has died; and the status of the process."""
        with self._lock:
            taken = {trial.slot for trial in self._running}
            slot = min({*range(self._workers)} - taken)
            trial = TrialProcess(job, slot, self._workers)
            self._running.append(trial)
        if self._signals:  # one came while it started
            trial.process.terminate()
        ended = trial.result()
        with self._lock:
            self._running.remove(trial)
            status = trial.close()
        interrupted = ended is not None and ended.state is RunState.STOPPED
        if self._signals and (interrupted or ended is None):
            raise OpenTrialError
        if ended is not None and interrupted:
            raise SearchError(
                f"{ended.reason or 'a trial was stopped'}; the search stopped, and its open trials "
                f"continue with: python -m determined_amp search --resume {self._folder}"
            )
        return ended, status

    def _stop_in_time(self) -> None:
        self.time_is_up = self.time_is_up or not self.stopping
        self._stop()

    def _stop(self) -> None:
        self._signals += 1
        for trial in list(self._running):
            if self._signals == 1:
                trial.process.terminate()  # a trial that trains stops at its next report
            else:
                trial.process.kill()
