"""Runs a search without a cluster, each trial in a process of its own."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
from optuna.trial import TrialState

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
    read_search,
    workers_of,
    write_config,
)
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study import next_trial, open_study, storing
from determined_amp.search.trial_process import Job, TrialProcess

# When the time is up, a trial has this many seconds to save a checkpoint. Then it is
# killed.
GRACE = 15.0

# What `run_comparison` returns after a signal.
BY_A_SIGNAL = "when it was interrupted"


def new_search(plan: SearchPlan, workers: int) -> Path:
    """Check that the trials accept the YAML, and make the folder of a new search.

    Args:
        plan: The search.
        workers: Number of trials that run at the same time.
    """
    for experiment, _ in plan.trials:
        experiment.loaded()
    folder = fresh_folder(str(plan.search.get("name", "search")))
    with storing(folder):
        plan.search = write_config(folder, plan.search, workers)
    return folder


def run_search(folder: Path, plan: SearchPlan, workers: int | None = None) -> int:
    """Run those trials of a search that have not ended.

    Args:
        folder: The folder of the search; `new_search` makes one.
        plan: The search.
        workers: Number of trials that run at the same time; None: as many as before.

    Returns:
        The exit status. 0: the search completed. 1: a trial failed, but others did not.
        Hyperparameters that cannot train are a result, not a failure. 130: a signal
            stopped it.

    Raises:
        UserError: if the search cannot continue, or no trial has a result.
    """
    workers = workers or workers_of(plan.search)
    stopped = _optimize(folder, plan, workers).stopping
    ended = read_search(folder)
    for line in closing_lines(ended, stopped=stopped):
        print(line)
    if stopped:
        return 130
    if not ended.ranked():
        first = ended.runs[0]
        raise UserError(
            f"no trial of {len(ended.runs)} has a result; trial {first.number}: "
            f"{first.reason}"
        )
    return 1 if any(run.state is RunState.FAILED for run in ended.runs) else 0


def run_comparison(folder: Path, plan: SearchPlan, time_limit: float) -> str:
    """Run those trials of a comparison that have not ended, one at a time.

    After `time_limit` seconds the comparison stops as if by a signal.

    Returns:
        Words for what cut the comparison short, such as "within 3 min"; empty if
            nothing did.
    """
    loop = _optimize(folder, plan, 1, time_limit)
    if loop.time_is_up:
        return f"within {minutes(time_limit)}"
    return BY_A_SIGNAL if loop.stopping else ""


def _optimize(
    folder: Path,
    plan: SearchPlan,
    workers: int,
    time_limit: float = 0.0,
) -> SearchLoop:
    """Run those trials of a search that have not ended. A limit of 0 is none."""
    with lock(folder, "this search"), storing(folder):
        # With several workers, the speeds of the trials do not count.
        if workers > workers_of(plan.search):
            plan.search = write_config(folder, plan.search, workers)
        study, waiting = open_study(folder, plan)
        loop = SearchLoop(plan, folder, study, workers)
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
        with on_stop_signals(loop.on_signal, numbers):
            # The first alarm stops the trials, and the second one kills them. Systems
            # limit a timer to some hundred years.
            signal.setitimer(signal.ITIMER_REAL, min(time_limit, 1e9), GRACE)
            try:
                loop.run(waiting)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
    return loop


@dataclass
class SearchLoop:
    """Runs the trials of a study, each in a process of its own.

    The first SIGINT, SIGTERM or SIGALRM stops every trial at its next report, with a
    checkpoint; a second one ends them at once.
    """

    plan: SearchPlan
    folder: Path
    study: optuna.Study
    workers: int  # number of trials that run at the same time
    stop_requests: int = 0  # by signals, the time limit or faults
    time_is_up: bool = False  # whether the time limit stopped it

    def __post_init__(self) -> None:
        self.search = Search(str(self.folder), (), self.plan.search)
        self.slots = list(range(self.workers))  # the free slots
        # The running trials, by the connection to their process.
        self.running: dict[Any, tuple[optuna.Trial, TrialProcess]] = {}

    @property
    def stopping(self) -> bool:
        """Whether a signal, the time limit or a fault asked to stop."""
        return self.stop_requests > 0

    def run(self, waiting: int) -> None:
        """Run the trials that wait, as many as `waiting` says.

        Raises:
            Exception: the fault that stopped the search, such as a full disk.
        """
        fault: Exception | None = None
        while self.running or (waiting and not self.stopping):
            try:
                while waiting and self.slots and not self.stopping:
                    waiting -= 1
                    self._start(next_trial(self.study, self.plan))
                if self.running:  # else no report would end the wait
                    for connection in wait([*self.running]):
                        self._answer(connection)
            except Exception as error:  # a fault of a file, not of a trial
                fault = fault or error
                if not self.stopping:
                    self.stop()
        if fault is not None:
            raise fault

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop the trials, because of a signal or the time limit."""
        if number == signal.SIGALRM and not self.stopping:
            self.time_is_up = True
        self.stop()

    def stop(self) -> None:
        """Stop the trials at their next report. A second call kills them."""
        self.stop_requests += 1
        for _, running in list(self.running.values()):
            if self.stop_requests == 1:
                # a trial that trains stops at its next report
                running.process.terminate()
            else:
                running.process.kill()

    def _start(self, trial: optuna.Trial) -> None:
        """Start a trial. If a killed search had completed it, only tell its result."""
        folder = RunFolder(trial_folder(self.folder, trial.number))
        if folder.record.exists():
            before = read_run(folder.path)
            if before.state in (RunState.COMPLETED, RunState.PRUNED):
                self._tell(trial, before)
                return
        experiment, hparams = self.plan.trials[trial.number]
        folder.describe_trial(trial.number, hparams)
        job = Job(self.plan.task, experiment, folder)
        running = TrialProcess(job, self.slots.pop(), self.workers)
        self.running[running.connection] = trial, running
        if self.stopping:  # a signal came while it started
            running.process.terminate()

    def _answer(self, connection: Any) -> None:
        """Answer a report of a trial, or judge the trial if its process has ended."""
        trial, _ = self.running[connection]
        try:
            connection.send(self._goes_on(trial, connection.recv()))
        except (EOFError, ConnectionError):
            self._judge(trial, self._end(connection))
        except Exception:
            # The process waits for an answer until its connection is closed.
            self._end(connection)
            raise

    def _end(self, connection: Any) -> Run:
        """End the process of a trial, and return its record."""
        _, running = self.running.pop(connection)
        self.slots.append(running.slot)
        return running.end()

    def _goes_on(self, trial: optuna.Trial, report: Values) -> bool:
        """Pass a validation to Optuna, and return whether the trial continues."""
        settings = self.plan.settings
        value = report.get(self.search.metric)
        if (
            report["group"] != "validation"
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            return True
        length = int(report[settings.time_metric])
        trial.report(value, length)
        return length >= settings.max_time or not trial.should_prune()

    def _judge(self, trial: optuna.Trial, ended: Run) -> None:
        """Tell the study how a trial ended. An interrupted trial stays open.

        Raises:
            UserError: if the trial was stopped, although the search was not: by its
                machine, as a full disk does.
        """
        if ended.state in (RunState.RUNNING, RunState.STOPPED) and self.stopping:
            return
        if ended.state is RunState.STOPPED:
            raise UserError(
                f"{ended.reason}; the search stopped, and its open trials continue "
                f"with: det-amp search --resume {self.folder}"
            )
        folder = RunFolder(Path(ended.name))
        run = read_run(folder.path)
        if ended.state is RunState.RUNNING:
            folder.end(RunState.FAILED, ended.reason)
        elif run.state is RunState.COMPLETED and self.search.value(run) is None:
            folder.end(RunState.FAILED, f"{self.search.metric} was not reported")
        self._tell(trial, read_run(folder.path))

    def _tell(self, trial: optuna.Trial, run: Run) -> None:
        """Print the end of a trial, and tell it to the study."""
        print(line_of_a_trial(self.search, run))
        value = self.search.value(run)
        if run.state is RunState.PRUNED:
            self.study.tell(trial, state=TrialState.PRUNED)
        elif value is None:
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, value)
