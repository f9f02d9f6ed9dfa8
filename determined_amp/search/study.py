"""Keeps the trials of a search without a cluster in an Optuna study.

A point enters the study only when its trial starts, because Optuna reads all waiting
trials whenever it is asked for one. The study keeps what Optuna needs: points, reported
values, and which trials run or have ended. Everything else is in the run folders. If a
kill leaves the study and a run folder in disagreement, the run folder counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.exceptions import OptunaError
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from determined_amp.amp.errors import UserError, one_line
from determined_amp.runs.folder import STUDY_FILE
from determined_amp.search.search_plan import SearchPlan


def open_study(folder: Path, plan: SearchPlan) -> tuple[optuna.Study, int]:
    """Open the study of a search, and count its trials that have not ended.

    Trials that ran when the search was killed wait again.
    """
    # A dashboard may lock the file for a moment.
    waiting_long = {"connect_args": {"timeout": 60}}
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{folder / STUDY_FILE}", engine_kwargs=waiting_long
    )
    study = optuna.create_study(
        storage=storage,
        pruner=plan.settings.pruner(),
        study_name=str(plan.search.get("name", "search")),
        direction="minimize" if plan.settings.smaller_is_better else "maximize",
        load_if_exists=True,
    )
    study_id = storage.get_study_id_from_name(study.study_name)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        trial_id = storage.get_trial_id_from_study_id_trial_number(
            study_id, trial.number
        )
        storage.set_trial_state_values(trial_id, TrialState.WAITING)
    ended = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
    return study, len(plan.points) - len(ended)


def next_trial(study: optuna.Study, plan: SearchPlan) -> optuna.Trial:
    """The first waiting trial; if none waits, the trial of the next point."""
    if not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.enqueue_trial(plan.points[len(study.get_trials(deepcopy=False))])
    return study.ask(plan.distributions)


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """Inside this block, raise a `UserError` if a file of the search cannot be read or
    written. A closed pipe of the terminal is none of its files.

    Trials that have not ended stay open, and continue when the search is resumed.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, OptunaError, SQLAlchemyError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # SQLite's own error omits the statement
            cause = cause.__cause__
        raise UserError(
            f"{folder}: its files cannot be read or written: {one_line(cause)}; "
            "free some space, or let this user write there, and go on with: det-amp "
            f"search --resume {folder}"
        ) from error
