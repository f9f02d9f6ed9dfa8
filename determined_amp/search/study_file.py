"""The Optuna study of a search without a cluster: an SQLite file with all that became of it.

`read_study` is for whoever makes something of the results.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from determined_amp.config.errors import UserError

FILE_NAME = "study.db"

# Marks a study as ours, and says how to read it.
_FORMAT_KEY, _FORMAT = "determined_amp_search", 1

# How many trials of a comparison ran at a time.
WORKERS_KEY = "workers"

_STATES = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
    TrialState.RUNNING: "running",
    TrialState.WAITING: "waiting",
}


class StudyError(UserError):
    """A file is no study, or not one of a search of this repository."""


@dataclass(frozen=True)
class SearchTrial:
    """One trial of a search.

    Args:
        number: From 0, in the order of their start.
        state: `complete`, `stopped` (by early stopping), `failed`, `running` or `waiting`.
        params: The searched hyperparameters as they were sampled, by dotted name.
        used: The same, nested, as they were used: an initial scale is rounded to a power of two.
        value: The searcher's metric at the end; None if there is none.
        metrics: The last validation metrics, by name.
        training: The last training metrics; empty for a trial that was scored, not trained.
        history: All validations: batches trained before it, and its metrics.
        folder: Its run folder.
        seed: Of its parameters and the order of its data.
        reason: Why it failed.
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


@dataclass(frozen=True)
class SearchStudy:
    """A search and its trials.

    Args:
        search: Its configuration, as it was given.
        trials: In the order of their start.
        workers: Trials at a time; 1 if nobody kept it.
    """

    search: Mapping[str, Any]
    trials: tuple[SearchTrial, ...]
    workers: int = 1

    @property
    def metric(self) -> str:
        """The validation metric that ranks the trials."""
        return str(self.search["searcher"]["metric"])

    @property
    def smaller_is_better(self) -> bool:
        """The direction of the metric."""
        return bool(self.search["searcher"].get("smaller_is_better", True))

    def ranked(self) -> list[SearchTrial]:
        """The trials that have a value, best first."""
        sign = 1 if self.smaller_is_better else -1
        valued = [(trial.value, trial) for trial in self.trials if trial.value is not None]
        return [trial for _, trial in sorted(valued, key=lambda pair: (sign * pair[0],))]


def read_study(path: Path) -> SearchStudy:
    """The search in a search folder, or in its `study.db`.

    Raises:
        StudyError: if there is none.
    """
    file = path / FILE_NAME if path.is_dir() else path
    return describe(load_study(file), file.parent)


def describe(study: optuna.study.Study, folder: Path) -> SearchStudy:
    """What `study` holds, of the search in `folder`."""
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
    )


def trial_folder(folder: Path, number: int) -> Path:
    """The run folder of a trial of the search in `folder`."""
    return folder / "trials" / f"{number:04d}"


def create_study(folder: Path, search: Mapping[str, Any]) -> optuna.study.Study:
    """A new study in a search folder."""
    smaller = search["searcher"].get("smaller_is_better", True)
    study = optuna.create_study(
        storage=_storage(folder / FILE_NAME, create=True),
        study_name=str(search.get("name", "search")),
        direction="minimize" if smaller else "maximize",
    )
    study.set_user_attr("search", dict(search))
    study.set_user_attr(_FORMAT_KEY, _FORMAT)  # last: with it, the study is whole
    return study


def load_study(file: Path) -> optuna.study.Study:
    """The study in an SQLite file.

    Raises:
        StudyError: if it is none of ours; such a file is left untouched.
    """
    if not file.is_file():
        raise StudyError(f"{file}: there is no such file; a search leaves one in its folder")
    try:
        storage = _storage(file)
        found = storage.get_all_studies()
    except (OptunaError, SQLAlchemyError, RuntimeError) as error:  # the last: of another version
        cause = error.__cause__ or error
        raise StudyError(f"{file}: is not a study: {getattr(cause, 'orig', cause)}") from error
    if [study.user_attrs.get(_FORMAT_KEY) for study in found] != [_FORMAT]:
        raise StudyError(
            f"{file}: is not a study that `python -m determined_amp search` of this version made"
        )
    return optuna.load_study(study_name=found[0].study_name, storage=storage)


def _storage(file: Path, *, create: bool = False) -> optuna.storages.RDBStorage:
    # SQLite undoes what a killed process left half done; opened read only, it could not.
    address = f"{file.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        # A dashboard that reads meanwhile may lock the file for a moment.
        return sqlite3.connect(address, uri=True, timeout=60, check_same_thread=False)

    return optuna.storages.RDBStorage(
        f"sqlite:///{file.name}",  # not the path: a URL gives some characters a meaning
        engine_kwargs={"creator": connect},
        skip_table_creation=not create,
    )
