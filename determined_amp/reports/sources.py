"""What a search over the initial loss scale observed, as one table, and that of a local study."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.config.errors import UserError
from determined_amp.search.study_file import SearchTrial, StudyError, read_study

SCALE = "init_scale"


class ReportError(UserError):
    """There is nothing to draw: what was found instead, and what to do."""


@dataclass(frozen=True)
class Row:
    """One trial.

    Args:
        number: In its search; the id of a trial on a cluster.
        state: As the search calls it.
        hparams: All hyperparameters, by dotted name.
        scale_log2: log2 of the initial loss scale.
        batches: Trained, or scored, before the last validation.
        metrics: The last validation metrics.
        training: The last training metrics; empty if the trial was scored, not trained.
        seed: Of parameters and data order; None if unknown.
        reason: Why it failed.
    """

    number: int
    state: str
    hparams: Mapping[str, Any]
    scale_log2: float
    batches: int
    metrics: Mapping[str, float]
    training: Mapping[str, float]
    seed: int | None = None
    reason: str | None = None

    @staticmethod
    def of(hparams: Mapping[str, Any], metrics: Mapping[str, float], **others: Any) -> Row | None:
        """A row, if these hyperparameters have an initial loss scale.

        What the trial says that it used counts first: a sampled one is rounded to a power of two.
        """
        scale = next((value for name, value in hparams.items() if is_scale(name)), None)
        log2 = metrics.get("init_scale_log2")
        if log2 is None and isinstance(scale, (int, float)) and scale > 0:
            log2 = math.log2(scale)
        if log2 is None:
            return None
        return Row(hparams=hparams, metrics=metrics, scale_log2=log2, **others)

    @property
    def scored(self) -> bool:
        """Whether it was measured on frozen parameters, not trained."""
        return "loss_scale_score" in self.metrics

    @property
    def skipped_steps(self) -> float | None:
        """Optimizer steps that overflowed, if it says so."""
        return self.training.get("skipped_steps", self.metrics.get("skipped_steps"))

    @property
    def overflow(self) -> bool | None:
        """Whether its first steps overflow, if it was measured."""
        found = self.metrics.get("overflow")
        return None if found is None else bool(found)


@dataclass(frozen=True)
class Search:
    """A search, or a single experiment, and its trials.

    Args:
        origin: Where it was read.
        config: Its configuration.
        rows: Its trials.
        environment: What the first of them ran on, as far as it is known: device, versions, date.
    """

    origin: str
    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.origin))

    @property
    def metric(self) -> str:
        """The validation metric that ranks the trials."""
        return str(self.config["searcher"]["metric"])

    @property
    def smaller_is_better(self) -> bool:
        return bool(self.config["searcher"].get("smaller_is_better", True))

    @property
    def also_searched(self) -> tuple[str, ...]:
        """Hyperparameters besides the scale that differ between trials."""
        names = dict.fromkeys(name for row in self.rows for name in row.hparams)
        return tuple(
            name
            for name in names
            if not is_scale(name) and len({repr(row.hparams.get(name)) for row in self.rows}) > 1
        )

    def ranked(self) -> list[Row]:
        """The trials that reported a finite metric, best first."""
        sign = 1 if self.smaller_is_better else -1
        valued = [row for row in self.rows if math.isfinite(row.metrics.get(self.metric, math.nan))]
        return sorted(valued, key=lambda row: sign * row.metrics[self.metric])


def read_local(path: Path) -> Search:
    """The search in a search folder, or in its `study.db`.

    Raises:
        ReportError: if it is none, or not one over the loss scale.
    """
    try:
        study = read_study(path)
    except StudyError as error:
        raise ReportError(
            f"{error}; allowed: the folder that `python -m determined_amp search` leaves, "
            "or the id of an experiment on a cluster"
        ) from error
    constants = {
        name: value
        for name, value in flat(study.search["hyperparameters"]).items()
        if not isinstance(value, Mapping)
    }
    rows = [
        Row.of(
            {**constants, **(flat(trial.used) or trial.params)},
            trial.metrics,
            number=trial.number,
            state=trial.state,
            batches=trial.history[-1][0] if trial.history else 0,
            training=trial.training,
            seed=trial.seed,
            reason=trial.reason,
        )
        for trial in study.trials
    ]
    return table(str(path), study.search, rows, _environment(study.trials[:1]))


def _environment(trials: Sequence[SearchTrial]) -> dict[str, str]:
    try:
        (first,) = trials
        found = json.loads((first.folder / "environment.json").read_text())
        device = {"device": found["device"]["name"]}
        return device | {key: str(found[key]) for key in ("torch", "determined", "date", "commit")}
    except (OSError, ValueError, LookupError, TypeError):  # a folder that was moved, or cleaned up
        return {}


def table(
    origin: str,
    config: Mapping[str, Any],
    rows: Sequence[Row | None],
    environment: Mapping[str, str],
) -> Search:
    """Put a search together and see that it is about the loss scale.

    Args:
        origin: Where it was read.
        config: Its configuration.
        rows: Its trials; None for one without an initial loss scale.
        environment: What they ran on.

    Raises:
        ReportError: if there is no trial, or none has an initial loss scale.
    """
    if not rows:
        raise ReportError(f"{origin}: has no trials yet; draw it when the first has ended")
    found = tuple(row for row in rows if row is not None)
    if not found:
        spaces = flat(config.get("hyperparameters") or {})
        searched = [name for name, value in spaces.items() if isinstance(value, Mapping)]
        raise ReportError(
            f"{origin}: no hyperparameter is called {SCALE}; it searches over "
            f"{', '.join(searched) or 'nothing'}. Allowed: an experiment with amp.{SCALE}, such "
            "as hp_search/loss_scale_grid.yaml"
        )
    return Search(origin, config, found, environment)


def is_scale(name: str) -> bool:
    """Whether a dotted name is that of an initial loss scale."""
    return name.rpartition(".")[2] == SCALE


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested hyperparameters by dotted name; a search space is one value."""
    return dict(_leaves(values, prefix))


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and "type" not in value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, Mapping) and value["type"] == "const":
            yield f"{prefix}{key}", value.get("val")
        else:
            yield f"{prefix}{key}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of `flat`."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        section = made
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return made
