"""What a search observed, and what the finder found, from a Determined master through its SDK."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined import errors

from determined_amp.finder.advice import FILE_NAME, FoundScale
from determined_amp.reports.master import asking_for
from determined_amp.reports.sources import ReportError, Row, Search, flat, table

if TYPE_CHECKING:
    from determined.experimental.client import Checkpoint, Determined


def read_experiment(number: int) -> Search:
    """An experiment and its trials, from the master that `DET_MASTER` names.

    Raises:
        ReportError: if there is no such master, login or experiment, or it is not about the scale.
    """
    with asking_for(number) as (determined, origin):
        return _read(determined, number, origin)


def read_finding(number: int) -> FoundScale:
    """What an experiment of `hp_search/find_loss_scale.yaml` found, from its checkpoint.

    Raises:
        ReportError: if there is no such experiment, or it left no finding.
    """
    with asking_for(number) as (determined, origin):
        checkpoints = determined.get_experiment(number).list_checkpoints()
        found = [one for one in checkpoints if FILE_NAME in (one.resources or {})]
        if not found:
            raise ReportError(
                f"{origin}: has no checkpoint with {FILE_NAME}; allowed: one of "
                "hp_search/find_loss_scale.yaml that has completed"
            )
        return FoundScale.from_json(_downloaded(found[0], origin), origin)


def _downloaded(checkpoint: Checkpoint, origin: str) -> Any:
    uuid = checkpoint.uuid
    with tempfile.TemporaryDirectory() as folder:
        try:
            checkpoint.download(folder)
        except errors.MultipleDownloadsFailed as error:
            raise ReportError(
                f"{origin}: its checkpoint cannot be downloaded from here. Where its storage can "
                f"be reached: det checkpoint download {uuid}; and here: --finding {FILE_NAME}"
            ) from error
        return json.loads((Path(folder) / FILE_NAME).read_text())


def _read(determined: Determined, number: int, origin: str) -> Search:
    experiment = determined.get_experiment(number)
    trials = experiment.list_trials()
    identifiers = [trial.id for trial in trials]
    validation = _last(determined, identifiers, "validation")
    training = _last(determined, identifiers, "training")
    nothing: tuple[int, Mapping[str, float]] = (0, {})
    rows = []
    for trial in trials:
        batches, metrics = validation.get(trial.id, nothing)
        row = Row.of(
            flat(trial.hparams or {}),
            metrics,
            number=trial.id,
            state=str(trial.state.value if trial.state else "unknown").lower(),
            batches=batches,
            training=training.get(trial.id, nothing)[1],
        )
        rows.append(row)
    return table(origin, experiment.config or {}, rows, {"master": determined._master})


def _last(
    determined: Determined, trials: list[int], group: str
) -> dict[int, tuple[int, Mapping[str, float]]]:
    """By trial, the batches trained before its last report of a group, and the numbers in it."""
    found: dict[int, tuple[int, Mapping[str, float]]] = {}
    if not trials:  # the master would answer with the metrics of none, or with an error
        return found
    for report in determined.iter_trials_metrics(trials, group):
        if report.steps_completed >= found.get(report.trial_id, (0, {}))[0]:
            found[report.trial_id] = report.steps_completed, _numbers(report.metrics)
    return found


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))
    }
