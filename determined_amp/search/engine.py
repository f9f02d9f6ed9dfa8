"""Runs a search without a cluster: keeps workers busy, stores their reports, stops on a signal."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any

import optuna
import yaml
from rich.console import Console

from determined_amp.config.errors import UserError, exit_status
from determined_amp.config.experiment import read_yaml
from determined_amp.config.overrides import with_overrides
from determined_amp.config.settings import ConfigError
from determined_amp.local.folder import fresh_folder
from determined_amp.search.run_trial import Outcome, TrialResult, Validation, check_trial
from determined_amp.search.search_display import SearchDisplay
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study_file import (
    FILE_NAME,
    WORKERS_KEY,
    create_study,
    describe,
    load_study,
)
from determined_amp.search.trial_kind import TrialKind
from determined_amp.search.trial_queue import TrialQueue
from determined_amp.search.workers import Worker

# Failures in a row for one reason that say that the others will fail, too.
SAME_FAILURES = 3


class SearchError(UserError):
    """The search cannot go on."""


def run_search(
    search: str | None, resume: Path | None, overrides: Sequence[str], workers: int
) -> int:
    """Run a new search, or go on with one; the exit status."""

    def run_it() -> int:
        folder = _folder(search, resume, overrides)
        with _locked(folder):
            _run(folder, workers)
        return 0

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return exit_status(run_it, before="")


def _folder(search: str | None, resume: Path | None, overrides: Sequence[str]) -> Path:
    """The folder of the search: the one to go on in, or a new one if there is no mistake."""
    if resume is not None:
        load_study(resume / FILE_NAME)
        return resume
    assert search is not None
    config = with_overrides(read_yaml(search), overrides)
    _check(config, search)
    folder = fresh_folder(Path("runs"), str(config.get("name", "search")))
    (folder / "search.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    create_study(folder, config)
    return folder


def _check(config: Mapping[str, Any], source: str) -> None:
    """Find mistakes that many trials would share before the first one starts."""
    try:
        space = SearchPlan(config).space
        for probe in space.probes():
            check_trial(config, space.nested(probe))
    except ConfigError as error:
        raise ConfigError(source, error.problems) from error


def _run(folder: Path, workers: int) -> None:
    study = load_study(folder / FILE_NAME)
    plan = SearchPlan(study.user_attrs["search"])
    display = SearchDisplay(Console(), plan, folder)
    if plan.kind is TrialKind.COMPARE:
        _keep_workers(study, workers)
        if workers > 1:
            display.warn_of_sharing(workers)
    engine = Engine(TrialQueue(plan, study, folder), display, workers)
    with display.bar(), engine.listening():
        engine.run(lambda: display.update(describe(study, folder)))
    display.close(describe(study, folder), stopped=engine.stopping)
    if engine.common_failure:
        raise SearchError(f"the last {SAME_FAILURES} trials failed alike: {engine.common_failure}")


def _keep_workers(study: optuna.study.Study, workers: int) -> None:
    before = study.user_attrs.get(WORKERS_KEY, workers)
    if before != workers:
        raise SearchError(
            f"--workers: got {workers}, but this comparison began with {before}, and speed depends "
            f"on it; allowed: {before}"
        )
    study.set_user_attr(WORKERS_KEY, workers)


class Engine:
    """Keeps workers busy with trials until there are none left, or a signal says stop.

    The first SIGINT or SIGTERM stops every trial at its next report, with a checkpoint; a second
    one ends them at once.

    Args:
        trials: Those of the search.
        display: Is told of what happens.
        workers: Trials at a time.
    """

    def __init__(self, trials: TrialQueue, display: SearchDisplay, workers: int) -> None:
        self._trials = trials
        self._display = display
        self._workers = workers
        self._idle: list[Worker] = []
        self._busy: dict[Worker, int] = {}
        self._failures: list[str] = []
        self._signals = 0

    @property
    def stopping(self) -> bool:
        """Whether a signal asked to stop."""
        return self._signals > 0

    @property
    def common_failure(self) -> str | None:
        """Why the last trials failed, if all of them did for one reason."""
        alike = len(self._failures) == SAME_FAILURES and len(set(self._failures)) == 1
        return self._failures[0] if alike else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the two signals; only in the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        for worker in list(self._busy):
            if self._signals == 1:
                worker.process.terminate()  # a trial that trains takes it for a wish
            else:
                worker.process.kill()

    def run(self, on_change: Callable[[], None]) -> None:
        """Run all trials; `on_change` is called after each message of a worker."""
        try:
            self._start_trials()
            while self._busy:
                by_connection = {worker.connection: worker for worker in self._busy}
                for ready in connection.wait(list(by_connection)):
                    self._handle(by_connection[ready])  # type: ignore[index]  # one of ours
                    on_change()
                self._start_trials()
        finally:
            for worker in self._busy:
                worker.close(kill=True)
            for worker in self._idle:
                worker.close()

    def _start_trials(self) -> None:
        while len(self._busy) < self._workers and not self.stopping and self.common_failure is None:
            found = self._trials.next_job()
            if found is None:
                return
            number, job = found
            worker = self._idle.pop() if self._idle else self._new_worker()
            self._busy[worker] = number
            worker.run(job)

    def _new_worker(self) -> Worker:
        taken = {worker.slot for worker in self._busy}
        slot = next(slot for slot in range(self._workers) if slot not in taken)
        return Worker(slot, self._workers)

    def _handle(self, worker: Worker) -> None:
        number = self._busy[worker]
        message = worker.receive()
        if isinstance(message, Validation):
            worker.answer(go_on=self._trials.validated(number, message))
            return
        del self._busy[worker]
        if message is None:
            status = worker.close()
            if not self.stopping:
                self._display.lost(number, status)
                self._trials.lost(number, status)
            return
        if self._trials.compared:
            worker.close()
        else:
            self._idle.append(worker)
        self._trials.ended(number, message)
        self._note(message)

    def _note(self, result: TrialResult) -> None:
        if result.outcome is Outcome.FAILED:
            self._failures = [*self._failures, result.reason or ""][-SAME_FAILURES:]
        else:
            self._failures = []


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second process from going on with the same search."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SearchError(f"{folder}: another process is running this search") from error
        yield
