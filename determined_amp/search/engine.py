"""Runs a search without a cluster: starts workers, stores their reports, stops on a signal."""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from determined_amp.amp.errors import ConfigError, UserError
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.processes import on_stop_signals
from determined_amp.runs.folder import FolderError, fresh_folder, lock
from determined_amp.runs.run import Report, RunState
from determined_amp.search.search_display import SearchDisplay, minutes
from determined_amp.search.search_folder import (
    read_config,
    read_search,
    workers_of,
    write_config,
)
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study import SearchStudy, StudyError, create_study, storing
from determined_amp.search.workers import FirstBatch, Worker

# After this many failures in a row for the same reason, the other trials would fail, too.
SAME_FAILURES = 3

# Seconds that a trial gets to save a checkpoint when the time is up; then it is killed.
GRACE = 15.0


class SearchError(UserError):
    """The search cannot continue."""


def run_search(
    search: str | None, resume: Path | None, overrides: Sequence[str], workers: int
) -> int:
    """Run a new search, or continue one.

    Args:
        search: The YAML of a new search; None with `resume`.
        resume: The folder of a search to continue.
        overrides: `KEY=VALUE` changes of the YAML.
        workers: Number of trials that run at the same time.

    Returns:
        The exit status. 0: the search completed, or a signal stopped it. 1: a trial failed, but
        others did not. Hyperparameters that cannot train are a result, not a failure.

    Raises:
        UserError: if it cannot start, cannot continue, or no trial has a result.
    """
    folder = resume or _new_folder(str(search), overrides, workers)
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
    engine = _run(folder, plan, display, workers)
    failure = engine.common_failure
    ended = read_search(folder)
    empty = not engine.stopping and not ended.ranked()
    display.close(ended, stopped=engine.stopping, failed=empty or failure is not None)
    if failure is not None:
        raise SearchError(f"the last {SAME_FAILURES} trials failed alike: {failure}")
    if empty:
        reasons = (f"trial {run.number}: {run.reason}" for run in ended.runs[:1])
        raise SearchError(f"no trial of {len(ended.runs)} has a result; {''.join(reasons)}")
    return 1 if ended.failed() else 0


def _new_folder(search: str, overrides: Sequence[str], workers: int) -> Path:
    """The folder of a new search, after checking the YAML."""
    config = with_overrides(read_yaml(search), overrides)
    try:
        SearchPlan(config).check()
    except ConfigError as error:
        raise ConfigError(search, error.problems) from error
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
    engine = _run(folder, plan, SearchDisplay(Console(), plan, folder), 1, time_limit)
    if engine.common_failure is not None:
        return f"because the last {SAME_FAILURES} failed alike: {engine.common_failure}"
    if engine.time_is_up:
        return f"within {minutes(time_limit)}"
    return "when it was interrupted" if engine.stopping else ""


def _run(
    folder: Path,
    plan: SearchPlan,
    display: SearchDisplay,
    workers: int,
    time_limit: float = math.inf,
) -> Engine:
    """Run all trials of the search in a folder."""
    with lock(folder, "this search"), storing(folder):
        if workers > workers_of(plan.search):  # from now on the speeds of its trials do not count
            write_config(folder, plan.search, workers)
        engine = Engine(SearchStudy(plan, folder), display, workers, time_limit)
        with on_stop_signals(engine.on_signal):
            engine.run()
    if engine.blocked is not None:
        raise SearchError(
            f"{engine.blocked}; the search stopped, and its open trials continue with: python -m "
            f"determined_amp search --resume {folder}"
        )
    return engine


class Engine:
    """Runs all trials in worker processes, until none is left or a signal stops the search.

    The first SIGINT or SIGTERM stops every trial at its next report, with a checkpoint; a second
    one ends them at once. After `time_limit` seconds the search stops as if by the first.

    Attributes:
        blocked: The machine problem that stopped the search, such as a full disk; else None.
        time_is_up: Whether the time limit stopped it.
    """

    def __init__(
        self, study: SearchStudy, display: SearchDisplay, workers: int, time_limit: float
    ) -> None:
        self._ends = time.monotonic() + time_limit
        self._study = study
        self._display = display
        self._workers = workers
        self._idle: list[Worker] = []
        self._busy: dict[Worker, int] = {}
        self.blocked: str | None = None
        self.time_is_up = False
        self._failures: list[str | None] = []
        self._signals = 0

    @property
    def stopping(self) -> bool:
        """Whether a signal or the time limit asked to stop."""
        return self._signals > 0

    @property
    def common_failure(self) -> str | None:
        """Why the last `SAME_FAILURES` trials failed, if all had the same reason; else None."""
        reasons = [reason for reason in self._failures if reason is not None]
        alike = len(reasons) == SAME_FAILURES and len({*map(_kind, reasons)}) == 1
        return reasons[-1] if alike else None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT and SIGTERM by stopping the trials."""
        self._stop()

    def _stop(self) -> None:
        self._signals += 1
        for worker in list(self._busy):
            if self._signals == 1:
                worker.process.terminate()  # a trial that trains stops at its next report
            else:
                worker.process.kill()

    def run(self) -> None:
        """Run all trials."""
        try:
            self._start_trials()
            while self._busy:
                by_connection = {worker.connection: worker for worker in self._busy}
                ready_ones = connection.wait(list(by_connection), self._patience())
                if not ready_ones:
                    self.time_is_up = self.time_is_up or not self.stopping
                    self._stop()
                for ready in ready_ones:
                    self._handle(by_connection[ready])  # type: ignore[index]  # one of ours
                self._start_trials()
        finally:
            for worker in self._busy:
                worker.close(kill=True)
            for worker in self._idle:
                worker.close()

    def _patience(self) -> float | None:
        """Seconds to wait for a message; a search that is stopping gets `GRACE` more."""
        if math.isinf(self._ends) or self._signals > 1:
            return None
        grace = GRACE if self.stopping else 0.0
        return max(self._ends + grace - time.monotonic(), 0.0)

    def _start_trials(self) -> None:
        while len(self._busy) < self._workers and not self.stopping and self.common_failure is None:
            trial = self._study.next_job()
            if trial is None:
                return
            number, job = trial
            taken = {worker.slot for worker in self._busy}
            slot = next(slot for slot in range(self._workers) if slot not in taken)
            worker = self._idle.pop() if self._idle else Worker(slot, self._workers)
            self._busy[worker] = number
            worker.run(job)

    def _handle(self, worker: Worker) -> None:
        number = self._busy[worker]
        message = worker.receive()
        if isinstance(message, FirstBatch):
            return
        if isinstance(message, Report):
            worker.answer(go_on=self._study.validated(number, message))
            return
        del self._busy[worker]
        if message is not None:
            if self._study.compares:  # each trial of a comparison has a new process
                worker.close()
            else:
                self._idle.append(worker)
            run = self._study.ended(number, message)
        else:
            status = worker.close()
            if self.stopping:
                return  # it was killed, and continues with a resume
            self._display.lost(number, status)
            run = self._study.lost(number, status)
        if run is not None:
            self._display.ended(run)
            failed = message is not None and message.state is RunState.FAILED
            self._failures = [*self._failures, run.reason if failed else None][-SAME_FAILURES:]
        elif message is not None and message.reason and self.blocked is None:
            self.blocked = message.reason
            self._stop()


def _kind(reason: str) -> str:
    """A reason with its numbers masked: they differ between trials, as in folder names."""
    return re.sub(r"\d+(\.\d+)?([eE][-+]?\d+)?", "#", reason)
