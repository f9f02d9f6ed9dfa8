"""Reads the trials of an experiment from a Determined master, through Determined's SDK."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined import errors as det_errors
from determined.common.api import bindings, errors

from determined_amp.amp.errors import ConfigError, one_line
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import parse, with_power_of_two
from determined_amp.experiment.files import temporary_folder
from determined_amp.experiment.machine import Machine
from determined_amp.report import ReportError
from determined_amp.report.page import write_files
from determined_amp.runs.master import NONSENSE, answering_in_time, log_in
from determined_amp.runs.run import SEED, Part, Report, Reports, Run, RunState, judged
from determined_amp.search.search_folder import Search
from determined_amp.search.task import Topic

if TYPE_CHECKING:
    from determined.common.api import Session
    from determined.experimental.client import Experiment, Trial

    from determined_amp.finder.found_scale import FoundScale

MASTER = "DET_MASTER"

# The report that the command `compare` leaves in its checkpoint, beside other files.
_TEXT = "precision.md"

# Topics of experiments whose trials are not compared by their settings.
_WITHOUT_SETTINGS = (Topic.FINDING, Topic.CHECK, Topic.LOSS_SCALES, Topic.COMPARISON)

_SIDE_BY_SIDE = (
    "the master does not tell which trials ran side by side on one machine, which changes their "
    "speeds",
)

_PAGE = 500  # runs in one answer of the master

# By group of reports: the key of their metrics.
_METRICS_OF_GROUP = {"training": "avg_metrics", "validation": "validation_metrics"}

# The states of trials that have ended, without `STATE_`.
_ENDED = {
    "COMPLETED": RunState.COMPLETED,
    "CANCELED": RunState.STOPPED,
    "ERROR": RunState.FAILED,
}


def read_experiment(number: int) -> Search:
    """Read an experiment and its trials from the master that `DET_MASTER` names.

    The configuration of every trial is read where precisions may be compared; it must then be one
    for `determined_amp train`.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such experiment, or its configuration cannot be read here.
    """
    with _on_master(number) as (session, experiment, origin):
        config: dict[str, Any] = {"hyperparameters": {}, **(experiment.config or {})}
        if not isinstance(config["hyperparameters"], Mapping):
            raise TypeError(f"its hyperparameters are {config['hyperparameters']!r}")
        trials = experiment.list_trials()
        reports, noted = _reports(session, trials), _noted(session, number)
        runs = tuple(
            _run(trial, origin, config, noted.get(trial.id, {}), reports[trial.id])
            for trial in trials
        )
    return Search(origin, runs, config, notes=_SIDE_BY_SIDE)


def _run(
    trial: Trial,
    origin: str,
    config: Mapping[str, Any],
    noted: Mapping[str, Any],
    reports: Reports,
) -> Run:
    """A trial of an experiment, with the settings of a run folder where they are compared.

    A trial that the master calls completed may have ended early. Only the settings show that,
    because they hold its length.
    """
    hparams, settings = with_power_of_two(trial.hparams or {}, config), {}
    if Topic.of(config) not in _WITHOUT_SETTINGS:
        try:
            settings = parse(config, origin, hyperparameters=hparams).settings
        except ConfigError as error:
            raise ReportError(
                f"{error}\nallowed: an experiment of determined_amp train, read where its code is"
            ) from error
        settings[SEED] = noted.get("seed")
    status = str(trial.state.value if trial.state else "").removeprefix("STATE_")
    state = _ENDED.get(status, RunState.RUNNING)
    reason = str(noted.get("failure") or "")
    if state is RunState.COMPLETED and reason:
        state = RunState.INVALID
    elif state is RunState.COMPLETED and settings:
        state, reason = RunState.PRUNED, "ended early by its search"
    elif state is RunState.STOPPED:
        reason = "it was canceled"
    machine = Machine(**noted.get("machine", {}))
    return Run(
        f"{origin}, trial {trial.id}",
        *judged(state, reason, settings, reports),
        (Part(settings=settings, machine=machine, date=noted.get("date")),),
        reports,
        number=trial.id,
        hparams=flat(hparams),
    )


def read_finding(number: int) -> FoundScale:
    """Read the finding of a `hp_search/find_loss_scale.yaml` experiment from its checkpoint.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such experiment, or it has no finding.
        LossScaleError: if the file in its checkpoint is not a finding.
    """
    from determined_amp.finder.found_scale import FILE_NAME, FoundScale  # noqa: PLC0415  # torch

    with _checkpoint(number, FILE_NAME) as (folder, origin):
        return FoundScale.from_json(json.loads((folder / FILE_NAME).read_text()), origin)


def fetch_comparison(number: int, folder: Path) -> str:
    """Download the report of an experiment that ran `compare`, from its checkpoint.

    Returns:
        The text of the report.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such experiment, or it has no report.
    """
    with _checkpoint(number, _TEXT) as (downloaded, _):
        paths = downloaded.glob("precision.*")
        files = {folder / path.name: path.read_bytes() for path in paths}
    write_files(folder, files)
    return files[folder / _TEXT].decode()


@contextmanager
def _checkpoint(number: int, name: str) -> Iterator[tuple[Path, str]]:
    """Download the checkpoint that has the file `name`, and delete it after the block.

    Yields:
        The folder of the checkpoint, and a name for the experiment.
    """
    with _on_master(number) as (session, experiment, origin), temporary_folder() as folder:
        saved = [c for c in experiment.list_checkpoints() if name in (c.resources or {})]
        if not saved:
            noted = [n.get("failure") or n.get("answer") for n in _noted(session, number).values()]
            why = next(filter(None, noted), "it has not completed, or ran another command")
            raise ReportError(f"{origin}: has no checkpoint with {name}: {why}")
        try:
            saved[0].download(str(folder))
        except det_errors.MultipleDownloadsFailed as error:
            raise ReportError(
                f"{origin}: its checkpoint cannot be downloaded from here. Where its storage can "
                f"be reached: det checkpoint download {saved[0].uuid}"
            ) from error
        yield folder, origin


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


def _reports(session: Session, trials: Iterable[Trial]) -> dict[int, Reports]:
    """The reports of all trials, by trial id."""
    reports = {trial.id: Reports() for trial in trials}
    # Without ids the master fails.
    for group, key in _METRICS_OF_GROUP.items() if reports else ():
        sent: dict[int, list[Report]] = {number: [] for number in reports}
        for answer in bindings.get_GetMetrics(session, trialIds=list(sent), group=group):
            for one in answer.metrics:
                sent[one.trialId].append(Report.read(one.totalBatches, one.metrics[key]))
        for number, ordered in sent.items():
            for report in sorted(ordered, key=lambda report: report.batches):
                reports[number].add(group, report)
    return reports


@contextmanager
def _on_master(number: int) -> Iterator[tuple[Session, Experiment, str]]:
    """A session with the master that `DET_MASTER` names, its experiment, and a name for that.

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
    with answering_in_time():
        session = log_in(address)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the SDK warns that it is deprecated
            from determined.experimental.client import Experiment  # noqa: PLC0415
        refusal = f"{session.master} gave no experiment {number}"
        try:
            experiment = Experiment(number, session)
            experiment.reload()
            yield session, experiment, f"experiment {number} on {session.master}"
        except errors.NotFoundException as error:
            raise ReportError(f"{session.master} has no experiment {number}: {error}") from error
        except (errors.BadRequestException, bindings.APIHttpError, OSError) as error:
            raise ReportError(f"{refusal}: {one_line(error)}") from error
        except (errors.BadResponseException, *NONSENSE) as error:
            raise ReportError(
                f"{refusal}: its answer is not that of Determined 0.38: {type(error).__name__} "
                f"{one_line(error)}"
            ) from error
