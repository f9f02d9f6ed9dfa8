"""Reads the trials of an experiment from a master, through Determined's SDK."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from determined import errors as det_errors
from determined.common.api import bindings

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.hyperparameters import with_power_of_two
from determined_amp.experiment.machine import Machine
from determined_amp.experiment.training import LENGTH_UNITS
from determined_amp.report.page import Written, write_files
from determined_amp.runs.master import log_in
from determined_amp.runs.run import (
    LENGTH,
    SEED,
    Part,
    Run,
    RunState,
)
from determined_amp.search.search_folder import Search

if TYPE_CHECKING:
    from determined.common.api import Session
    from determined.experimental.client import Experiment, Trial

MASTER = "DET_MASTER"

# The checkpoint of the command `compare` has this report, and other files.
_TEXT = "precision.md"

_SIDE_BY_SIDE = (
    "the master does not tell which trials ran side by side on one machine, which "
    "changes their speeds",
)

# The states of trials that have ended.
_ENDED = {
    "STATE_COMPLETED": RunState.COMPLETED,
    "STATE_CANCELED": RunState.STOPPED,
    "STATE_ERROR": RunState.FAILED,
}


def read_experiment(number: int) -> Search:
    """Read an experiment and its trials from the master that `DET_MASTER` names.

    Raises:
        UserError: if there is no such master, or the login fails.
        UserError: if there is no such experiment.
    """
    with _on_master(number) as (session, experiment, origin):
        config: Config = {"hyperparameters": {}, **(experiment.config or {})}
        trials = experiment.list_trials()
        noted = [_noted(session, trial.id) for trial in trials]
        hparams = [
            flat(with_power_of_two(trial.hparams or {}, config)) for trial in trials
        ]
        reports = [list(_reports(trial)) for trial in trials]
    unknown = flat({**config, "hyperparameters": {}})
    shared = next(filter(None, map(_settings, noted)), unknown)
    runs = [
        _run(*read, origin=origin, shared=shared)
        for read in zip(trials, noted, hparams, reports, strict=True)
    ]
    return Search(origin, tuple(runs), config, notes=_SIDE_BY_SIDE)


def _run(
    trial: Trial,
    noted: Values,
    hparams: Config,
    lines: Sequence[Values],
    *,
    origin: str,
    shared: Config,
) -> Run:
    """A trial of an experiment, with the settings that it noted.

    A trial that failed before it noted its settings gets its hyperparameters, and the
    settings that all trials of the experiment share.
    """
    of_trial = {f"hyperparameters.{name}": hparams[name] for name in hparams}
    settings = _settings(noted) or {**shared, **of_trial}
    settings[SEED] = noted.get("seed")
    lengths = [settings.get(f"{LENGTH}.{unit}") for unit in LENGTH_UNITS]
    trains = any(line["group"] == "training" for line in lines)
    has_length = any(lengths) and trains
    state, reason = _end(
        trial, "".join(noted.get("failure", "")), has_length=has_length
    )
    machine = Machine(**noted.get("machine", {}))
    run = Run(
        f"{origin}, trial {trial.id}",
        state,
        reason,
        (Part(settings=settings, machine=machine, date=noted.get("date")),),
        number=trial.id,
        hparams=hparams,
    )
    return run.reported(lines)


def _end(trial: Trial, failure: str, *, has_length: bool) -> tuple[RunState, str]:
    """How a trial ended, and why, before its reports are looked at.

    The master also calls a trial completed that has failed, or that its search ended
    early. Only its length reveals the latter.
    """
    status = trial.state.value if trial.state else ""
    state = _ENDED.get(status, RunState.RUNNING)
    if state is RunState.STOPPED:
        return state, "it was canceled"
    if state is RunState.COMPLETED and failure:
        return RunState.INVALID, failure
    if state is RunState.COMPLETED and has_length:
        return RunState.PRUNED, "ended early by its search"
    return state, failure


def _noted(session: Session, trial: int) -> Values:
    """What a trial noted in the metadata of its run."""
    metadata = bindings.get_GetRunMetadata(session, runId=trial).metadata or {}
    noted: Values = metadata.get("amp") or {}
    return noted


def _settings(noted: Values) -> Values:
    """The settings that a trial noted, as JSON cut into parts; empty if it did not."""
    return flat(json.loads("".join(noted.get("settings", "{}"))))


def _reports(trial: Trial) -> Iterator[Values]:
    """The training reports of a trial, then its validations, each by batches."""
    for group in ("training", "validation"):
        sent = trial.iter_metrics(group)
        for report in sorted(sent, key=lambda report: report.steps_completed):
            yield {**report.metrics, "group": group, "batches": report.steps_completed}


def fetch_comparison(number: int, folder: Path) -> Written:
    """Download the report of an experiment that ran `compare`, from its checkpoint.

    Raises:
        UserError: if there is no such master, or the login fails.
        UserError: if there is no such experiment, or it has no report.
    """
    with (
        _on_master(number) as (session, experiment, origin),
        TemporaryDirectory() as downloaded,
    ):
        checkpoints = experiment.list_checkpoints()
        saved = [c for c in checkpoints if _TEXT in (c.resources or {})]
        if not saved:
            why = "it has not completed, or ran another command"
            for trial in experiment.list_trials():
                noted = _noted(session, trial.id)
                why = "".join(noted.get("failure") or noted.get("answer") or why)
            raise UserError(f"{origin}: has no checkpoint with {_TEXT}: {why}")
        try:
            saved[0].download(downloaded)
        except det_errors.MultipleDownloadsFailed as error:
            raise UserError(
                f"{origin}: its checkpoint cannot be downloaded from here. Where its "
                f"storage can be reached: det checkpoint download {saved[0].uuid}"
            ) from error
        paths = Path(downloaded).glob("precision.*")
        files = {folder / path.name: path.read_bytes() for path in paths}
    write_files(folder, files)
    return Written(files[folder / _TEXT].decode(), list(files))


@contextmanager
def _on_master(number: int) -> Iterator[tuple[Session, Experiment, str]]:
    """Yield a session with the master that `DET_MASTER` names, the experiment, and the
    experiment's name for messages.

    Raises:
        UserError: if there is no such master, or the login fails.
        UserError: if a request inside the block fails, as when there is no such
            experiment.
    """
    address = os.environ.get(MASTER)
    if not address:
        raise UserError(
            f"experiment {number} is on a cluster, and {MASTER} is not set; set it to "
            "the address of the master, or give the folder of a local search"
        )
    session = log_in(address)
    with warnings.catch_warnings():
        # The SDK warns that it is deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        from determined.experimental.client import Experiment  # noqa: PLC0415
    try:
        experiment = Experiment(number, session)
        experiment.reload()
        yield session, experiment, f"experiment {number} on {session.master}"
    except UserError:
        raise
    except Exception as error:  # the SDK raises errors of any type on an odd answer
        raise UserError(
            f"{session.master} gave no experiment {number}: {type(error).__name__}: "
            f"{one_line(error)}; allowed: an experiment on a master of Determined 0.38"
        ) from error
