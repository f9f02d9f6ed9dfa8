"""What a search observed, from a Determined master, through Determined's own SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reports.master import asking_for
from reports.sources import Row, Search, flat, table

if TYPE_CHECKING:
    from determined.experimental.client import Determined


def read_experiment(number: int) -> Search:
    """An experiment and its trials, from the master that `DET_MASTER` names.

    Raises:
        ReportError: if there is no such master, login or experiment, or it is not about the scale.
    """
    with asking_for(number) as (determined, origin):
        return _read(determined, number, origin)


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
