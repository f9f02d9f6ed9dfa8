"""The Optuna study of a search without a cluster: an SQLite file with the search and its trials."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from determined_amp.amp.errors import UserError
from determined_amp.amp.fields import read
from determined_amp.experiment.experiment import Searcher, searcher_of
from determined_amp.finder.score import bits_from_default
from determined_amp.runs.folder import trial_folder

FILE_NAME = "study.db"

# Marks a study as ours; the value is the version of its format.
_FORMAT_KEY, _FORMAT = "determined_amp_search", 1

# The attribute with the number of concurrent trials of a comparison.
WORKERS_KEY = "workers"

# The attributes of a trial that are read, and their types; `fixed_params` is Optuna's own.
_OF_A_TRIAL: Mapping[str, type | tuple[type, ...]] = {
    "bracket": int,
    "fixed_params": dict,
    "history": list,
    "invalid": bool,
    "reason": str,
    "restarts": int,
    "seed": (int, type(None)),
    "training": dict,
    "used": dict,
}

_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class StudyError(UserError):
    """A file is not a study of this package, or cannot be read or written."""


@dataclass(frozen=True)
class SearchTrial:
    """One trial of a search.

    Args:
        number: Trials are numbered from 0 in the order of their start.
        state: `complete`, `stopped` (by early stopping), `failed`, `running` or `waiting`.
        params: The sampled hyperparameters, by dotted name.
        used: The same, nested; an initial scale from a range is rounded to a power of two.
        value: The searcher's metric at the end; None if there is none.
        metrics: The last validation metrics, by name.
        training: The last training metrics; empty for a trial that was scored, not trained.
        history: All validations: the number of batches trained before each, and its metrics.
        folder: Its run folder.
        seed: Seed of parameters and data order; None if unknown.
        reason: Why it failed; None if it did not.
        invalid: Whether it failed because its hyperparameters cannot train, which is a result.
    """

    number: int
    state: str
    params: Mapping[str, Any]
    used: Mapping[str, Any]
    value: float | None
    metrics: Mapping[str, float]
    training: Mapping[str, float]
    history: tuple[tuple[int, Mapping[str, float]], ...]
    folder: Path
    seed: int | None
    reason: str | None
    invalid: bool = False


@dataclass(frozen=True)
class SearchStudy:
    """A search and its trials.

    Args:
        search: The configuration of the search.
        trials: Its trials, in the order of their start.
        workers: Trials that ran at the same time; 1 if unknown.
    """

    search: Mapping[str, Any]
    trials: tuple[SearchTrial, ...]
    workers: int = 1

    def failed(self) -> list[SearchTrial]:
        """The failed trials, except those with invalid hyperparameters."""
        return [trial for trial in self.trials if trial.state == "failed" and not trial.invalid]

    def ranked(self) -> list[SearchTrial]:
        """The trials that have a value, best first; of equals those nearest to 2^16."""
        return searcher_of(self.search).best_first(
            self.trials,
            lambda trial: trial.value,
            lambda trial: bits_from_default(trial.metrics.get("init_scale_log2", math.nan)),
        )


def read_study(path: Path) -> SearchStudy:
    """The search in a search folder, or in its `study.db`.

    Raises:
        StudyError: if there is no study of this package.
    """
    file = path / FILE_NAME if path.is_dir() else path
    return describe(load_study(file), file.parent)


def describe(study: optuna.study.Study, folder: Path) -> SearchStudy:
    """The content of the study of the search in `folder`."""
    trials = tuple(_describe(trial, folder) for trial in study.get_trials(deepcopy=False))
    attributes = study.user_attrs
    return SearchStudy(attributes["search"], trials, attributes.get(WORKERS_KEY, 1))


def _describe(trial: FrozenTrial, folder: Path) -> SearchTrial:
    attributes = trial.user_attrs
    history = attributes.get("history", [])
    return SearchTrial(
        number=trial.number,
        state=_STATES[trial.state],
        params=trial.params or trial.system_attrs.get("fixed_params", {}),
        used=attributes.get("used", {}),
        value=trial.value,
        metrics=history[-1][1] if history else {},
        training=attributes.get("training", {}),
        history=tuple((batches, metrics) for batches, metrics in history),
        folder=trial_folder(folder, trial.number),
        seed=attributes.get("seed"),
        reason=attributes.get("reason"),
        invalid=bool(attributes.get("invalid")),
    )


def create_study(folder: Path, search: Mapping[str, Any]) -> optuna.study.Study:
    """Create the study of a search in its folder."""
    study = optuna.create_study(
        storage=_storage(folder / FILE_NAME, create=True),
        study_name=str(search.get("name", "search")),
        direction="minimize" if searcher_of(search).smaller_is_better else "maximize",
    )
    study.set_user_attr("search", dict(search))
    study.set_user_attr(_FORMAT_KEY, _FORMAT)  # last: it marks the study as complete
    return study


def load_study(file: Path) -> optuna.study.Study:
    """The study in an SQLite file.

    Raises:
        StudyError: if it is not from this package. The file is then not changed.
    """
    if not file.is_file():
        raise StudyError(f"{file}: there is no such file; a search makes one in its folder")
    try:
        storage = _storage(file)
        found = storage.get_all_studies()
        if [study.user_attrs.get(_FORMAT_KEY) for study in found] != [_FORMAT]:
            raise StudyError(
                f"{file}: is not a study that `python -m determined_amp search` of this version "
                "made"
            )
        study = optuna.load_study(study_name=found[0].study_name, storage=storage)
        wrong = next(_foreign(study), None)
    # RuntimeError: another version of Optuna wrote the file. The others: a byte has changed, and
    # the database has no checksum to detect it.
    except (OptunaError, SQLAlchemyError, RuntimeError, LookupError, ValueError, TypeError) as e:
        cause = e.__cause__ or e
        raise StudyError(f"{file}: is not a study: {getattr(cause, 'orig', cause)}") from e
    if wrong is not None:
        raise StudyError(
            f"{file}: is damaged, or another program has changed it: {wrong}; start a new search"
        )
    return study


def _foreign(study: optuna.study.Study) -> Iterator[str]:
    """A sentence for each attribute that our search cannot have written."""
    search, workers = study.user_attrs.get("search"), study.user_attrs.get(WORKERS_KEY, 1)
    problems: list[str] = []
    if not isinstance(search, dict) or not isinstance(search.get("hyperparameters", {}), dict):
        yield "its attribute search is no configuration"
    elif read(Searcher, search.get("searcher"), "searcher", problems, strict=False) is None:
        yield f"its attribute search: {problems[0]}"
    if not isinstance(workers, int):
        yield f"its attribute {WORKERS_KEY} is {workers!r}"
    for trial in study.get_trials(deepcopy=False):
        given = {**trial.user_attrs, **trial.system_attrs}
        for name in given.keys() & _OF_A_TRIAL.keys():
            if not isinstance(given[name], _OF_A_TRIAL[name]):
                yield f"attribute {name} of trial {trial.number} is {given[name]!r}"
        if trial.value is not None and not trial.user_attrs.get("history"):
            yield f"trial {trial.number} has a result and no history"
        for validation in trial.user_attrs.get("history", []):
            if not _is_validation(validation):
                yield f"attribute history of trial {trial.number} has {validation!r}"


def _is_validation(stored: object) -> bool:
    match stored:
        case [int(), dict(metrics)]:
            return all(isinstance(value, (int, float)) for value in metrics.values())
    return False


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Inside this block, raise a `StudyError` for disk errors of the study in `folder`.

    Trials that have not ended stay open, and continue when the search is resumed.
    """
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise StudyError(
            f"{folder / FILE_NAME}: cannot be read or written: {getattr(cause, 'orig', cause)}; "
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
