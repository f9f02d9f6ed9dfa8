"""Reads the trials of an experiment from a Determined master, through Determined's SDK."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined import errors as det_errors
from determined.common.api import bindings, errors

from determined_amp.amp.metrics import MetricName
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.experiment import TRIAL_SEED, parse
from determined_amp.experiment.settings import ConfigError
from determined_amp.finder.advice import FILE_NAME, FoundScale
from determined_amp.local.folder import End
from determined_amp.local.master import NONSENSE, log_in
from determined_amp.report.run_settings import SEED, of_experiment
from determined_amp.report.runs import Machine, Report, ReportError, Run, Source, State, ended
from determined_amp.search.task import Task, Verb

if TYPE_CHECKING:
    from determined.experimental.client import Checkpoint, Determined, Trial

Reports = tuple[Report, ...]

MASTER = "DET_MASTER"

# The report that the command `compare` leaves in its checkpoint.
_TEXT = "precision.md"

# The platform's names for floats that JSON cannot write as numbers.
_NO_JSON_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})

# These mark the log of a search's invalid trial, which the platform calls completed.
_GUARD = "determined_amp.amp.guard: "
_INVALID = "invalid trial: "


def read_experiment(number: int, *, with_settings: bool = False) -> Source:
    """Read an experiment and its trials from the master that `DET_MASTER` names.

    Args:
        number: The id of the experiment.
        with_settings: Also read the configuration of every trial, which must be one for
            `determined_amp train`, and its log, for the machine and why the trial ended.

    Raises:
        MasterError: if there is no such master, or the login fails.
        ReportError: if there is no such experiment, or its configuration cannot be read here.
    """
    with _on_master(number) as (determined, origin):
        experiment = determined.get_experiment(number)
        trials = experiment.list_trials()
        config = experiment.config or {}
        training = _reports(determined, trials, "training")
        validation = _reports(determined, trials, "validation")
        runs = (
            _run(origin, config, t, training[t.id], validation[t.id], with_settings=with_settings)
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
            raise ReportError(
                f"{origin}: has no checkpoint with {_TEXT}; it did not end, or could train in fp32 "
                "only, which its log says"
            )
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
    training: Reports,
    validation: Reports,
    *,
    with_settings: bool,
) -> Run:
    hparams = trial.hparams or {}
    settings = _settings(origin, config, hparams) if with_settings else {}
    # The seed of a search's trial is known only if the search sets it; else the platform draws it.
    known = settings.get("searcher.name") == "single" or TRIAL_SEED in hparams
    return Run(
        f"{origin}, trial {trial.id}",
        settings,
        training,
        validation,
        *_ended(settings, trial, training, validation),
        seed=settings.get(SEED) if known else None,
        machine=_machine(trial, training) if with_settings else Machine(),
        number=trial.id,
        hparams=flat(hparams),
    )


def _ended(
    settings: Mapping[str, Any], trial: Trial, training: Reports, validation: Reports
) -> tuple[State, str]:
    """How a trial ended, from its state on the master, its reports and its log.

    A trial that the master calls completed may have ended early. Only the settings show that,
    because they hold its length. Without settings the log is not read.
    """
    status = str(trial.state.value if trial.state else "").removeprefix("STATE_").lower()
    said = None
    if settings and status == "error":
        said = _last_match(trial, "no retry can help", r"no retry can help: (.*)")
    ends = {
        "error": End("failed", said[0] if said else "", 0),
        "canceled": End("stopped", "it was canceled", 0),
        "completed": End("stopped" if settings else "completed", "ended early by its search", 0),
    }
    state, reason = ended(settings, training, validation, ends.get(status))
    if state is State.STOPPED and status == "completed":
        said = _last_match(trial, _INVALID, rf"{_INVALID}(.*)")
        said = said or _last_match(trial, _GUARD, rf"ERROR: .*{re.escape(_GUARD)}(.*)")
        if said:
            return ended(settings, training, validation, End("failed", said[0], 0))
    return state, reason


def _settings(
    origin: str, config: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The configuration of one trial with every default filled in, as in a run folder."""
    try:
        task = Task.of(config)
        experiment = parse(
            config,
            origin,
            trial=task.trial if task else None,
            hyperparameters=hyperparameters,
            completed_by_master=True,
        )
        return of_experiment(experiment)
    except ConfigError as error:
        raise ReportError(
            f"{error}\nallowed: an experiment of determined_amp train, read where its code is"
        ) from error


def _reports(determined: Determined, trials: Iterable[Trial], group: str) -> dict[int, Reports]:
    """The reports of one metric group, by trial id."""
    found: dict[int, list[Report]] = {trial.id: [] for trial in trials}
    if found:  # without ids the master answers with an error
        for report in determined.iter_trials_metrics(list(found), group):
            date = report.end_time.isoformat(timespec="seconds")
            numbers = _numbers(report.metrics)
            found[report.trial_id].append(Report(report.steps_completed, numbers, date))
    return {
        trial: tuple(sorted(reports, key=lambda report: report.batches))
        for trial, reports in found.items()
    }


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "batches"
        if isinstance(value, (int, float)) or (isinstance(value, str) and value in _NO_JSON_NUMBERS)
    }


def _machine(trial: Trial, training: Sequence[Report]) -> Machine:
    """The machine of a trial, from the `precision.described` line in its log.

    In older logs the startup hook printed that line, and the versions in a second line.
    """
    described = r"\d+ x (.+), natively: .*tf32 (yes|no)(?:.*; torch (\S+), Python (\S+))?"
    found = _last_match(trial, ", natively: ", described) or (Machine.device, None, None, None)
    device, tf32, torch, python = found
    if torch is None:
        versions = _last_match(trial, "startup-hook: Python", r"Python (\S+) .*torch==(\S+)")
        python, torch = versions or (Machine.torch, Machine.torch)
    on_gpu = any(MetricName.PEAK_RESERVED_MEMORY_MIB in report.metrics for report in training)
    return Machine(
        device=device,
        on_gpu=on_gpu,
        has_tf32=on_gpu if tf32 is None else tf32 == "yes",
        torch=torch,
        versions={"python": python},
        date=training[0].date if training else None,
    )


def _last_match(trial: Trial, text: str, pattern: str) -> tuple[Any, ...] | None:
    """The groups of `pattern` in the last matching line of a trial's log; `text` prefilters."""
    lines = trial.iter_logs(search_text=text)
    found = [match.groups() for line in lines if (match := re.search(pattern, line))]
    return found[-1] if found else None


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
