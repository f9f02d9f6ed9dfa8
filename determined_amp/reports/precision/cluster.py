"""The trials of an experiment on a Determined master."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_amp.config.experiment import parse
from determined_amp.config.settings import ConfigError
from determined_amp.reports.master import asking_for
from determined_amp.reports.precision.run import (
    Machine,
    Reading,
    Report,
    Run,
    State,
    ended,
    one_line,
)
from determined_amp.reports.precision.settings import SEED, of_experiment
from determined_amp.reports.sources import ReportError
from determined_amp.search.compose import compose

if TYPE_CHECKING:
    from determined.experimental.client import Determined, Trial

# What the platform writes for a float that JSON has no number for.
_NO_JSON_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})

_UNKNOWN = "unknown"


def read_trials(number: int) -> Reading:
    """All trials of an experiment on the master that `DET_MASTER` names.

    Raises:
        ReportError: if there is no such master, login or experiment, or its configuration is not
            one of `determined_amp.train` that can be read here.
    """
    with asking_for(number) as (determined, origin):
        experiment = determined.get_experiment(number)
        trials = experiment.list_trials()
        config = experiment.config or {}
        training = _reports(determined, trials, "training")
        validation = _reports(determined, trials, "validation")
        return Reading(
            tuple(
                _run(origin, config, trial, training[trial.id], validation[trial.id])
                for trial in trials
            )
        )


def _run(
    origin: str,
    config: Mapping[str, Any],
    trial: Trial,
    training: tuple[Report, ...],
    validation: tuple[Report, ...],
) -> Run:
    hparams = trial.hparams or {}
    settings = _settings(origin, config, hparams)
    state, reason = ended(settings, training, validation)
    status = str(trial.state.value if trial.state else _UNKNOWN).removeprefix("STATE_").lower()
    if status == "error":
        said = _last_match(trial, "no retry can help", r"no retry can help: (.*)")
        state, reason = State.FAILED, said[0] if said else reason or "its log has the reason"
    # In a search every trial has a seed of its own, made from the experiment's; or it is given one.
    known = settings["searcher.name"] == "single" or {"experiment", "seed"} <= hparams.keys()
    return Run(
        name=f"{origin}, trial {trial.id}",
        settings=settings,
        machine=_machine(trial, training),
        seed=settings[SEED] if known else None,
        training=training,
        validation=validation,
        state=state,
        reason=one_line(reason),
    )


def _settings(
    origin: str, config: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The configuration of one trial with every default filled in, as a run folder has it."""
    try:
        if "experiment" in hyperparameters:  # a search of this repository
            config = compose(config, hyperparameters, Path.cwd())
            hyperparameters = config["hyperparameters"]
        experiment = parse(
            config, origin, hyperparameters=hyperparameters, completed_by_master=True
        )
    except ConfigError as error:
        raise ReportError(
            f"{error}\nallowed: an experiment of determined_amp.train, asked for where its code is"
        ) from error
    return of_experiment(experiment)


def _reports(
    determined: Determined, trials: Iterable[Trial], group: str
) -> dict[int, tuple[Report, ...]]:
    """The reports of one group, by trial."""
    found: dict[int, list[Report]] = {trial.id: [] for trial in trials}
    if found:  # the master would answer with the metrics of none, or with an error
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
    """What the startup hook wrote into the log; no report has it."""
    natively = r"\d+ x (.+), natively: .*tf32 (yes|no)"
    device, tf32 = _last_match(trial, ", natively: ", natively) or (_UNKNOWN, None)
    versions = _last_match(trial, "startup-hook: Python", r"Python (\S+) .*torch==(\S+)")
    python, torch = versions or (_UNKNOWN, _UNKNOWN)
    on_gpu = any("peak_reserved_memory_mib" in report.metrics for report in training)
    return Machine(
        device=device,
        on_gpu=on_gpu,
        has_tf32=on_gpu if tf32 is None else tf32 == "yes",
        torch=torch,
        versions={"python": python},
        date=training[0].date if training else None,
    )


def _last_match(trial: Trial, text: str, pattern: str) -> tuple[str, ...] | None:
    """The groups of a pattern in the last line of a trial's log that has this text and matches."""
    lines = trial.iter_logs(search_text=text)
    found = [match.groups() for line in lines if (match := re.search(pattern, line))]
    return found[-1] if found else None
