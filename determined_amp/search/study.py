"""The trials of a search without a cluster, in an Optuna study.

All points are enqueued before the first trial. The study keeps what Optuna needs: points, reported
values, and which trials wait, run, or have ended. Everything else is in the run folders.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from determined_amp.amp.errors import UserError
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.experiment import read_yaml
from determined_amp.local.checkpoint_storage import is_of_the_machine
from determined_amp.runs.folder import RunFolder, read_record, read_run, trial_folder
from determined_amp.runs.run import Report, Run, RunState
from determined_amp.search.search_folder import STUDY_FILE, result
from determined_amp.search.search_plan import Method, SearchPlan
from determined_amp.search.workers import Job, TrialResult

_SCALE = "amp.init_scale"


class StudyError(UserError):
    """A file is not the study of a search, or cannot be read or written."""


class SearchStudy:
    """The trials of one search.

    Raises:
        StudyError: if the file is not the study of a search. It is then not changed.
    """

    def __init__(self, plan: SearchPlan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._study, self._storage = _load(folder / STUDY_FILE)
        self._study.pruner = plan.pruner()
        for point in plan.points[len(self._trials()) :]:
            self._study.enqueue_trial(point)
        self._open: list[int] = []
        self._deaths: Counter[int] = Counter()
        for trial in self._trials(TrialState.RUNNING):
            self._reopen(trial.number)

    def _reopen(self, number: int) -> None:
        """Continue a trial of a killed search, unless its folder has the end already."""
        folder = RunFolder(trial_folder(self._folder, number))
        if folder.record.exists():
            run = read_record(folder.path)
            if run.state in (RunState.COMPLETED, RunState.PRUNED):
                self.ended(number, TrialResult(run.state, reason=run.reason))
                return
        self._open.append(number)

    @property
    def compares(self) -> bool:
        """Whether this is a comparison of precisions."""
        return self._plan.compares

    def next_job(self) -> tuple[int, Job] | None:
        """The number and the job of the trial to start next; None if there is none.

        A trial that was interrupted comes before those that wait.
        """
        if self._open:
            number = self._open.pop(0)
        elif self._trials(TrialState.WAITING):
            number = self._study.ask(self._plan.distributions).number
        else:
            return None
        return number, self._job(number)

    def _job(self, number: int) -> Job:
        plan, folder = self._plan, RunFolder(trial_folder(self._folder, number))
        # The process may have been killed before Optuna stored all values of a point.
        point = {**plan.points[number], **self._trials()[number].params}
        sampled = plan.space.nested(point)
        # A trial that continues keeps its configuration, even if the YAML has changed since.
        path = str(folder.config)
        started = folder.config.exists()
        config = read_yaml(path) if started else plan.experiment(number, sampled).config
        hparams = {axis.name: value_at(sampled, axis.name) for axis in plan.space.axes}
        if _SCALE in hparams:  # the sampled scale is rounded to a power of two
            hparams[_SCALE] = value_at(config["hyperparameters"], _SCALE)
        folder.describe_trial(number, hparams)
        return Job(plan.task, config, folder.path)

    def validated(self, number: int, validation: Report) -> bool:
        """Store a validation, and return whether the trial continues."""
        settings = self._plan.settings
        value = validation.metrics.get(settings.metric)
        length = int(validation.metrics.get(settings.time_metric or "", validation.batches))
        # After the death of its process a trial repeats validations that are stored.
        stored = self._trials()[number].intermediate_values
        if value is None or not math.isfinite(value) or length in stored:
            return True
        trial = self._running(number)
        trial.report(value, length)
        if settings.name is not Method.ADAPTIVE_ASHA or length >= (settings.max_time or 0):
            return True
        return not trial.should_prune()

    def ended(self, number: int, ended: TrialResult) -> Run | None:
        """Record how a trial ended, and return it; None if it was interrupted and continues."""
        if ended.state is RunState.STOPPED:
            self._open.append(number)
            return None
        folder, metric = RunFolder(trial_folder(self._folder, number)), self._plan.settings.metric
        folder.end(ended.state, ended.reason or "")
        run = read_run(folder.path)
        value = result(run, metric)
        if run.state is RunState.COMPLETED and value is None:
            folder.end(RunState.FAILED, f"{metric} was not reported")
            run = read_run(folder.path)
        if run.state is RunState.PRUNED:
            self._study.tell(number, state=TrialState.PRUNED)
        elif run.state is RunState.COMPLETED and value is not None:
            self._study.tell(number, value)
        else:
            self._study.tell(number, state=TrialState.FAIL)
        return run

    def lost(self, number: int, status: int | None) -> Run | None:
        """Let a trial whose process died continue; return it if it failed.

        It fails if it has died more than `max_restarts` times.
        """
        self._deaths[number] += 1
        if self._deaths[number] <= self._plan.max_restarts:
            self._open.append(number)
            return None
        times = f"its process died {self._deaths[number]} times, the last time with status {status}"
        return self.ended(number, TrialResult(RunState.FAILED, reason=times))

    def _trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states or None)

    def _running(self, number: int) -> optuna.Trial:
        study = self._storage.get_study_id_from_name(self._study.study_name)
        trial = self._storage.get_trial_id_from_study_id_trial_number(study, number)
        return optuna.Trial(self._study, trial)


def create_study(folder: Path, config: Mapping[str, Any]) -> optuna.study.Study:
    """Create the study of a search in its folder."""
    smaller_is_better = config["searcher"].get("smaller_is_better", True)
    return optuna.create_study(
        storage=_storage(folder / STUDY_FILE, create=True),
        study_name=str(config.get("name", "search")),
        direction="minimize" if smaller_is_better else "maximize",
    )


def _load(file: Path) -> tuple[optuna.study.Study, optuna.storages.RDBStorage]:
    try:
        storage = _storage(file)
        return optuna.load_study(study_name=None, storage=storage), storage
    # RuntimeError: another version of Optuna wrote the file. ValueError: it has not one study.
    except (OptunaError, SQLAlchemyError, RuntimeError, LookupError, ValueError, TypeError) as e:
        cause = e.__cause__ or e
        raise StudyError(f"{file}: is not a study: {getattr(cause, 'orig', cause)}") from e


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Inside this block, raise a `StudyError` for disk errors of the study and runs in `folder`.

    Trials that have not ended stay open, and continue when the search is resumed.
    """
    try:
        yield
    except (OSError, StorageInternalError, SQLAlchemyError) as error:
        if isinstance(error, OSError) and not is_of_the_machine(error, folder):
            raise
        cause = error.__cause__ or error
        file = getattr(error, "filename", None) or folder / STUDY_FILE
        why = getattr(cause, "strerror", None) or getattr(cause, "orig", cause)
        raise StudyError(
            f"{file}: cannot be read or written: {why}; "
            "free some space, or let this user write there, and go on with: python -m "
            f"determined_amp search --resume {folder}"
        ) from error


def _storage(file: Path, *, create: bool = False) -> optuna.storages.RDBStorage:
    # Not read-only: SQLite must be able to roll back the transaction of a killed process.
    address = f"{file.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        # A dashboard may lock the file for a moment while it reads.
        return sqlite3.connect(address, uri=True, timeout=60, check_same_thread=False)

    return optuna.storages.RDBStorage(
        f"sqlite:///{file.name}",  # not the path: some characters have a meaning in a URL
        engine_kwargs={"creator": connect},
        skip_table_creation=not create,
    )
