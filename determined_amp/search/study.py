"""The trials of a search without a cluster, in an Optuna study.

All points are in the study before the first trial. The study keeps what Optuna needs: points,
reported values, and which trials wait, run, or have ended. Everything else is in the run folders.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from determined_amp.amp.errors import UserError
from determined_amp.local.checkpoint_storage import is_of_the_machine
from determined_amp.runs.run import Report
from determined_amp.search.search_folder import STUDY_FILE, read_config
from determined_amp.search.search_plan import Method, SearchPlan


class StudyError(UserError):
    """A file is not the study of a search, or cannot be read or written."""


def open_trials(folder: Path, plan: SearchPlan) -> tuple[optuna.Study, int]:
    """The study of a search with all its points, and the number of trials that wait.

    Trials that ran when a search was killed wait again.

    Raises:
        StudyError: if the file is not the study of a search. It is then not changed.
    """
    study, storage = _load(folder, plan)
    for point in plan.points[len(study.get_trials(deepcopy=False)) :]:
        study.add_trial(
            optuna.create_trial(
                state=TrialState.WAITING, params=point, distributions=plan.distributions
            )
        )
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        storage.set_trial_state_values(_id_of(study, storage, trial.number), TrialState.WAITING)
    return study, len(study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))


def goes_on_after(folder: Path, number: int, validation: Report) -> bool:
    """Store a validation of a running trial, and return whether the trial continues."""
    plan = SearchPlan(read_config(folder))
    study, storage = _load(folder, plan)
    settings = plan.settings
    value = validation.metrics.get(settings.metric)
    length = int(validation.metrics.get(settings.time_metric or "", validation.batches))
    # After the death of its process a trial repeats validations that are stored.
    stored = study.get_trials(deepcopy=False)[number].intermediate_values
    if value is None or not math.isfinite(value) or length in stored:
        return True
    trial = optuna.Trial(study, _id_of(study, storage, number))
    trial.report(value, length)
    if settings.name is not Method.ADAPTIVE_ASHA or length >= (settings.max_time or 0):
        return True
    return not trial.should_prune()


def create_study(folder: Path, config: Mapping[str, Any]) -> optuna.study.Study:
    """Create the study of a search in its folder."""
    smaller_is_better = config["searcher"].get("smaller_is_better", True)
    return optuna.create_study(
        storage=_storage(folder / STUDY_FILE, create=True),
        study_name=str(config.get("name", "search")),
        direction="minimize" if smaller_is_better else "maximize",
    )


def _load(folder: Path, plan: SearchPlan) -> tuple[optuna.Study, optuna.storages.RDBStorage]:
    file = folder / STUDY_FILE
    try:
        storage = _storage(file)
        # The points are drawn already, so there is nothing to sample.
        sampler, pruner = optuna.samplers.RandomSampler(), plan.pruner()
        return optuna.load_study(
            study_name=None, storage=storage, sampler=sampler, pruner=pruner
        ), storage
    # RuntimeError: another version of Optuna wrote the file. ValueError: it has not one study.
    except (OptunaError, SQLAlchemyError, RuntimeError, LookupError, ValueError, TypeError) as e:
        cause = e.__cause__ or e
        raise StudyError(f"{file}: is not a study: {getattr(cause, 'orig', cause)}") from e


def _id_of(study: optuna.Study, storage: optuna.storages.RDBStorage, number: int) -> int:
    """The storage's id of a trial."""
    of_study = storage.get_study_id_from_name(study.study_name)
    return storage.get_trial_id_from_study_id_trial_number(of_study, number)


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


class _Storage(optuna.storages.RDBStorage):
    """SQLite locks no row, so two threads that ask at once would be given the same trial."""

    _lock = threading.Lock()

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        with self._lock:
            return super().set_trial_state_values(trial_id, state, values)


def _storage(file: Path, *, create: bool = False) -> optuna.storages.RDBStorage:
    # Not read-only: SQLite must be able to roll back the transaction of a killed process.
    address = f"{file.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        # A trial or a dashboard may lock the file for a moment.
        return sqlite3.connect(address, uri=True, timeout=60, check_same_thread=False)

    return _Storage(
        f"sqlite:///{file.name}",  # not the path: some characters have a meaning in a URL
        engine_kwargs={"creator": connect},
        skip_table_creation=not create,
    )
