"""Reads the trials of an experiment from a Determined master, through Determined's SDK."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined import errors as det_errors
from determined.common.api import bindings, errors

from determined_amp.amp.fields import ConfigError
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import parse
from determined_amp.finder.advice import FILE_NAME, FoundScale
from determined_amp.report.source import ReportError, Source
from determined_amp.runs.master import NONSENSE, log_in
from determined_amp.runs.run import Machine, Part, Report, Reports, Run, RunState, judged
from determined_amp.runs.settings import SEED, of_experiment
from determined_amp.search.task import Task, Verb

if TYPE_CHECKING:
    from determined.common.api import Session
    from determined.experimental.client import Checkpoint, Determined, Trial

MASTER = "DET_MASTER"

# The report that the command `compare` leaves in its checkpoint.
_TEXT = "precision.md"

# The platform's names for floats that JSON cannot write as numbers.
_NO_JSON_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})

_PAGE = 500  # runs in one answer of the master

# The states of trials that have ended, without `STATE_`.
_ENDED = {
    "COMPLETED": RunState.COMPLETED,
    "CANCELED": RunState.STOPPED,
    "ERROR": RunState.FAILED,
}


def read_experiment(number: int, *, with_settings: bool = False) -> Source:
    """Read an experiment and its trials from the master that `DET_MASTER` names.

    Args:
        number: The id of the experiment.
        with_settings: Also read the configuration of every trial, which must be one for
            `determined_amp train`.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such experiment, or its configuration cannot be read here.
    """
    with _on_master(number) as (determined, origin):
        experiment = determined.get_experiment(number)
        trials = experiment.list_trials()
        config = experiment.config or {}
        reports, noted = _reports(determined, trials), _noted(determined._session, number)
        runs = (
            _run(origin, config, t, reports[t.id], noted.get(t.id, {}), with_settings=with_settings)
            for t in trials
        )
        return Source(origin, tuple(runs), config, notes=_unknown(trials))


def _unknown(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Sentences for the report on what the master does not tell."""
    if len(trials) < 2:
        return ()
    return (
        "the master does not tell which trials ran side by side on one machine, which changes "
        "their speeds",
    )


def read_finding(number: int) -> FoundScale:
    """Read the finding of a `hp_search/find_loss_scale.yaml` experiment from its checkpoint.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such experiment, or it has no finding.
        LossScaleError: if the file in its checkpoint is not a finding.
    """
    with _on_master(number) as (determined, origin):
        checkpoints = determined.get_experiment(number).list_checkpoints()
        found = [one for one in checkpoints if FILE_NAME in (one.resources or {})]
        if not found:
            raise ReportError(
                f"{origin}: has no checkpoint with {FILE_NAME}; allowed: one of "
                "hp_search/find_loss_scale.yaml that has completed"
            )
        with _downloaded(found[0], origin, f"; and here: --finding {FILE_NAME}") as folder:
            return FoundScale.from_json(json.loads((folder / FILE_NAME).read_text()), origin)


def fetch_comparison(number: int, folder: Path) -> str | None:
    """Download the report of an experiment that ran `compare`, from its checkpoint.

    Args:
        number: The id of the experiment.
        folder: Folder for its files.

    Returns:
        The text of the report; None for another kind of experiment.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such experiment, or it has no report.
    """
    with _on_master(number) as (determined, origin):
        experiment = determined.get_experiment(number)
        if not is_compare_command(experiment.config or {}):
            return None
        left = [c for c in experiment.list_checkpoints() if _TEXT in (c.resources or {})]
        if not left:
            noted = _noted(determined._session, number).values()
            known = next((n.get("failure") or n.get("answer") for n in noted), None)
            raise ReportError(f"{origin}: has no report: {known or 'its comparison has not ended'}")
        with _downloaded(left[0], origin, "") as downloaded:
            for path in downloaded.iterdir():
                if path.suffix in (".html", ".json", ".md", ".png"):
                    shutil.copy(path, folder / path.name)
        return (folder / _TEXT).read_text(encoding="utf-8")


def is_compare_command(config: Mapping[str, Any]) -> bool:
    """Whether the entrypoint of an experiment is the command `compare`."""
    task = Task.of(config)
    return task is not None and task.verb is Verb.COMPARE


@contextmanager
def _downloaded(checkpoint: Checkpoint, origin: str, instead: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint.download(folder)
        except det_errors.MultipleDownloadsFailed as error:
            raise ReportError(
                f"{origin}: its checkpoint cannot be downloaded from here. Where its storage can "
                f"be reached: det checkpoint download {checkpoint.uuid}{instead}"
            ) from error
        yield Path(folder)


def _run(
    origin: str,
    config: Mapping[str, Any],
    trial: Trial,
    reports: Reports,
    noted: Mapping[str, Any],
    *,
    with_settings: bool,
) -> Run:
    settings: dict[str, Any] = {}
    if with_settings:
        settings = _settings(origin, config, trial.hparams or {})
        settings[SEED] = noted.get("seed")
    machine = Machine.read(noted["machine"]) if "machine" in noted else Machine()
    state, reason = _ended(trial, noted, settings, reports)
    return Run(
        f"{origin}, trial {trial.id}",
        state,
        reason,
        (Part(settings=settings, machine=machine, date=noted.get("date")),),
        reports,
        number=trial.id,
        hparams=flat(trial.hparams or {}),
    )


def _noted(session: Session, experiment: int) -> dict[int, Mapping[str, Any]]:
    """What the trials of an experiment noted in the metadata of their runs, by trial id."""
    of_experiment = {
        **{"columnName": "experimentId", "kind": "field", "location": "LOCATION_TYPE_RUN"},
        **{"operator": "=", "type": "COLUMN_TYPE_NUMBER", "value": experiment},
    }
    group = {"children": [of_experiment], "conjunction": "and", "kind": "group"}
    wanted = json.dumps({"filterGroup": group, "showArchived": True})
    noted: dict[int, Mapping[str, Any]] = {}
    while True:
        page = bindings.v1SearchRunsRequest(filter=wanted, limit=_PAGE, offset=len(noted))
        runs = bindings.post_SearchRuns(session, body=page).runs
        noted |= {run.id: (run.metadata or {}).get("amp") or {} for run in runs}
        if len(runs) < _PAGE:
            return noted


def _ended(
    trial: Trial, noted: Mapping[str, Any], settings: Mapping[str, Any], reports: Reports
) -> tuple[RunState, str]:
    """How a trial ended, from its state on the master, its metadata and its reports.

    A trial that the master calls completed may have ended early. Only the settings show that,
    because they hold its length.
    """
    status = str(trial.state.value if trial.state else "").removeprefix("STATE_")
    state = _ENDED.get(status, RunState.RUNNING)
    reason = str(noted.get("failure") or "")
    if state is RunState.COMPLETED and reason:
        state = RunState.INVALID
    elif state is RunState.COMPLETED and settings:
        state, reason = RunState.PRUNED, "ended early by its search"
    elif state is RunState.STOPPED:
        reason = "it was canceled"
    return judged(state, reason, settings, reports)


def _settings(
    origin: str, config: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The configuration of one trial with every default filled in, as in a run folder."""
    try:
        task = Task.of(config)
        trial = task.trial if task else None
        experiment = parse(config, origin, trial=trial, hyperparameters=hyperparameters)
        return of_experiment(experiment)
    except ConfigError as error:
        raise ReportError(
            f"{error}\nallowed: an experiment of determined_amp train, read where its code is"
        ) from error


def _reports(determined: Determined, trials: Iterable[Trial]) -> dict[int, Reports]:
    """The reports of all trials, by trial id."""
    reports = {trial.id: Reports() for trial in trials}
    for group in ("training", "validation") if reports else ():  # without ids the master fails
        found: dict[int, list[Report]] = {number: [] for number in reports}
        for sent in determined.iter_trials_metrics(list(found), group):
            found[sent.trial_id].append(Report(sent.steps_completed, _numbers(sent.metrics)))
        for number, ordered in found.items():
            for report in sorted(ordered, key=lambda report: report.batches):
                reports[number].add(group, report)
    return reports


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "batches"
        if isinstance(value, (int, float)) or (isinstance(value, str) and value in _NO_JSON_NUMBERS)
    }


@contextmanager
def _on_master(number: int) -> Iterator[tuple[Determined, str]]:
    """The master that `DET_MASTER` names, and a name for its experiment `number`.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if a request inside the block fails, as when there is no such experiment.
    """
    address = os.environ.get(MASTER)
    if not address:
        raise ReportError(
            f"experiment {number} is on a cluster, and {MASTER} is not set; set it to the address "
            "of the master, or give the folder of a local search"
        )
    session = log_in(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the SDK warns that it is deprecated
        from determined.experimental.client import Determined  # noqa: PLC0415
    try:
        yield Determined._from_session(session), f"experiment {number} on {session.master}"
    except errors.NotFoundException as error:
        raise ReportError(f"{session.master} has no experiment {number}: {error}") from error
    except (
        errors.BadRequestException,
        errors.BadResponseException,
        bindings.APIHttpError,
        OSError,
        *NONSENSE,
    ) as error:
        raise ReportError(f"{session.master} gave no experiment {number}: {error}") from error
