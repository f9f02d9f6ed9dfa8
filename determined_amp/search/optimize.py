"""Runs a search without a cluster: `Study.optimize`, with each trial in a process of
its own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Values
from determined_amp.local.processes import on_stop_signals
from determined_amp.runs.folder import (
    RunFolder,
    fresh_folder,
    lock,
    read_run,
    trial_folder,
)
from determined_amp.runs.run import Run, RunState
from determined_amp.search.search_display import closing_lines, line_of_a_trial, minutes
from determined_amp.search.search_folder import (
    Search,
    read_config,
    read_search,
    result,
    workers_of,
    write_config,
)
from determined_amp.search.search_plan import AshaSearcher, SearchPlan
from determined_amp.search.study import open_study, storing
from determined_amp.search.trial_process import Job, TrialProcess

# Seconds that a trial gets to save a checkpoint when the time is up; then it is killed.
GRACE = 15.0

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


def new_search(plan: SearchPlan, workers: int) -> Path:
    """The folder of a new search, after what its trial says of the YAML.

    Args:
        plan: The search.
        workers: Number of trials that run at the same time.
    """
    plan.check_trial()
    folder = fresh_folder(Path("runs"), str(plan.search.get("name", "search")))
    with storing(folder):
        write_config(folder, plan.search, workers)
    return folder


def run_search(folder: Path, workers: int | None = None) -> int:
    """Run all trials of the search in a folder that have not ended.

    Args:
        folder: The folder; `new_search` makes one.
        workers: Number of trials that run at the same time; None: as many as before.

    Returns:
        The exit status. 0: the search completed. 1: a trial failed, but others did not.
        Hyperparameters that cannot train are a result, not a failure. 130: a signal
            stopped it.

    Raises:
        UserError: if it cannot continue, or no trial has a result.
    """
    plan = SearchPlan(read_config(folder))
    workers = workers or workers_of(plan.search)
    if plan.compares and workers > 1:
        print(
            f"{workers} trials at a time share the processors, and a GPU if there are "
            "fewer: their accuracies can be compared, their speeds cannot"
        )
    stopped = _optimize(folder, plan, workers).stopping
    ended = read_search(folder)
    for line in closing_lines(ended, folder, stopped=stopped):
        print(line)
    if stopped:
        return 130
    if not ended.ranked():
        first = ended.runs[0]
        raise SearchError(
            f"no trial of {len(ended.runs)} has a result; trial {first.number}: "
            f"{first.reason}"
        )
    return 1 if ended.failed() else 0


def run_comparison(
    folder: Path, time_limit: float, is_paused: Callable[[], bool]
) -> str:
    """Run all trials of the comparison in a folder that have not ended, one at a time.

    After `time_limit` seconds, or at a report while it `is_paused`, it stops as if by a
    signal.

    Returns:
        When or why it ended before its last trial, such as "within 3 min"; else an
            empty text.
    """
    objective = _optimize(
        folder, SearchPlan(read_config(folder)), 1, time_limit, is_paused
    )
    if objective.time_is_up:
        return f"within {minutes(time_limit)}"
    return INTERRUPTED if objective.stopping else ""


def _optimize(
    folder: Path,
    plan: SearchPlan,
    workers: int,
    time_limit: float | None = None,
    is_paused: Callable[[], bool] = bool,
) -> Objective:
    """Run all trials of the search in a folder."""
    with lock(folder, "this search"), storing(folder):
        # from now on the speeds of its trials do not count
        if workers > workers_of(plan.search):
            write_config(folder, plan.search, workers)
        study, waiting = open_study(folder, plan)
        objective = Objective(plan, folder, workers, is_paused)
        with (
            on_stop_signals(lambda number, frame: objective.stop()),
            objective.limited_to(time_limit),
            suppress(OpenTrialError),
        ):
            study.optimize(
                objective, n_trials=waiting, n_jobs=workers, catch=FailedTrialError
            )
        if objective.fault is not None:
            raise objective.fault
    return objective


class Objective:
    """Runs a trial in a process of its own, and returns the value of its metric.

    Optuna calls it in one thread for each trial that runs at the same time. The first
    SIGINT or SIGTERM stops every trial at its next report, with a checkpoint; a second
    one ends them at once.

    Args:
        plan: The search.
        folder: Its folder.
        workers: Number of trials that run at the same time.
        is_paused: Asked at each report whether to stop as if by a signal.

    Attributes:
        fault: The error that stopped the search, such as a full disk; else None.
        time_is_up: Whether the time limit stopped it.
    """

    def __init__(
        self,
        plan: SearchPlan,
        folder: Path,
        workers: int,
        is_paused: Callable[[], bool] = bool,
    ) -> None:
        self._plan = plan
        self._is_paused = is_paused
        self._folder = folder
        self._workers = workers
        self._slots = list(range(workers))  # those that are free
        # Processes are started and joined one at a time: multiprocessing looks at all
        # of them.
        self._lock = threading.Lock()
        self._running: list[TrialProcess] = []
        self.fault: Exception | None = None
        self.time_is_up = False
        self._signals = 0

    @property
    def stopping(self) -> bool:
        """Whether a signal, the time limit or a fault asked to stop."""
        return self._signals > 0

    @contextmanager
    def limited_to(self, seconds: float | None) -> Iterator[None]:
        """Stop the trials after this time inside this block, and kill them `GRACE`
        later.
        """
        ends = () if seconds is None else (seconds, seconds + GRACE)
        timers = [threading.Timer(end, self._stop_in_time) for end in ends]
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
        if self.stopping:
            raise OpenTrialError
        metric = self._plan.settings.metric
        try:
            run = self._run(trial)
        except Exception as error:  # of a file, not of the trial
            self.fault = error
            self.stop()
            raise OpenTrialError from error
        print(line_of_a_trial(run, metric))
        if run.state is RunState.PRUNED:
            raise optuna.TrialPruned
        best = Search(str(self._folder), (run,), self._plan.search).value(run)
        if best is None or result(run, metric) is None:
            raise FailedTrialError(run.reason)
        return best

    def _run(self, trial: optuna.Trial) -> Run:
        """Run a trial in its process; the run as its folder has it.

        Raises:
            OpenTrialError: if it was interrupted by the end of the search.
            SearchError: if the machine interrupted it, as a full disk does.
        """
        folder = RunFolder(trial_folder(self._folder, trial.number))
        if folder.record.exists():
            before = read_run(folder.path)
            if before.state in (RunState.COMPLETED, RunState.PRUNED):
                return before  # a killed search could not tell the study
        experiment, hparams = self._plan.trial(trial.number)
        folder.describe_trial(trial.number, hparams)
        ended = self._in_a_process(trial, Job(self._plan.task, experiment, folder))
        if ended.state in (RunState.RUNNING, RunState.STOPPED) and self.stopping:
            raise OpenTrialError
        if ended.state is RunState.STOPPED:
            raise SearchError(
                f"{ended.reason}; the search stopped, and its open trials "
                "continue with: det-amp search --resume "
                f"{self._folder}"
            )
        metric = self._plan.settings.metric
        run = read_run(folder.path)
        if ended.state is RunState.RUNNING:
            folder.end(RunState.FAILED, ended.reason)
        elif run.state is RunState.COMPLETED and result(run, metric) is None:
            folder.end(RunState.FAILED, f"{metric} was not reported")
        return read_run(folder.path)

    def _in_a_process(self, trial: optuna.Trial, job: Job) -> Run:
        """Run a job; its record."""
        with self._lock:
            slot = self._slots.pop()
            process = TrialProcess(job, slot, self._workers)
            self._running.append(process)
        if self.stopping:  # a signal came while it started
            process.process.terminate()
        try:
            process.answer(lambda report: self._goes_on(trial, report))
        finally:  # it waits for an answer until the connection is closed
            with self._lock:
                self._running.remove(process)
                self._slots.append(slot)
                ended = process.end()
        return ended

    def _goes_on(self, trial: optuna.Trial, report: Values) -> bool:
        """Give a validation to Optuna; whether the trial continues after this
        report.
        """
        if not self.stopping and self._is_paused():
            self.stop()
        settings = self._plan.settings
        value = report.get(settings.metric)
        if report["group"] != "validation" or not isinstance(value, (int, float)):
            return True
        if not math.isfinite(value):
            return True
        asha = settings if isinstance(settings, AshaSearcher) else None
        length = int(report[asha.time_metric if asha else "batches"])
        trial.report(value, length)
        return asha is None or length >= asha.max_time or not trial.should_prune()

    def _stop_in_time(self) -> None:
        self.time_is_up = self.time_is_up or not self.stopping
        self.stop()

    def stop(self) -> None:
        """Stop the trials at their next report; the second time, end them."""
        self._signals += 1
        for trial in list(self._running):
            if self._signals == 1:
                # a trial that trains stops at its next report
                trial.process.terminate()
            else:
                trial.process.kill()
