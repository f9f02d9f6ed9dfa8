"""The `searcher` section of a search."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.settings import setting
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.fields import read
from determined_amp.experiment.training import LENGTH_UNITS


class Method(enum.Enum):
    """How the points of a search are chosen."""

    SINGLE = "single"
    RANDOM = "random"
    GRID = "grid"
    ADAPTIVE_ASHA = "adaptive_asha"


class Mode(enum.Enum):
    """How many brackets `adaptive_asha` has on a cluster: one, half of them, or all."""

    AGGRESSIVE = "aggressive"
    STANDARD = "standard"
    CONSERVATIVE = "conservative"


_COMMON = {"name", "metric", "smaller_is_better"}
_TAKES = {
    Method.SINGLE: _COMMON,
    Method.GRID: _COMMON | {"max_concurrent_trials"},
    Method.RANDOM: _COMMON | {"max_concurrent_trials", "max_trials"},
    Method.ADAPTIVE_ASHA: _COMMON
    | {"max_concurrent_trials", "max_trials", "time_metric", "max_time"}
    | {"mode", "divisor", "max_rungs"},
}
_NEEDS = {
    Method.RANDOM: ("max_trials",),
    Method.ADAPTIVE_ASHA: ("max_trials", "time_metric", "max_time"),
}


@dataclass(frozen=True)
class SearcherSettings:
    """The `searcher` section; the names are Determined's."""

    name: Method = setting()
    metric: str = setting()  # validation metric that ranks trials
    smaller_is_better: bool = setting(True)  # direction of the metric
    max_trials: int | None = setting(None, at_least=1)
    # Used on a cluster only; elsewhere `--workers` sets it.
    max_concurrent_trials: int = setting(16, at_least=0)
    time_metric: str | None = setting(None)  # unit of `max_time`: `batches` or `epochs`
    max_time: int | None = setting(None, at_least=1)  # length of a trial that is not stopped early
    # Used on a cluster only; elsewhere all trials are compared with each other.
    mode: Mode = setting(Mode.STANDARD)
    divisor: int = setting(4, at_least=2)  # one in this many trials continues at a rung
    max_rungs: int = setting(5, at_least=1)  # largest number of rungs, the end of a trial included

    def first_rung(self) -> int:
        """The length, in `time_metric`, at which `adaptive_asha` first compares trials.

        Each following rung is `divisor` times as long. A trial that is not stopped reaches
        `max_time`. Without early stopping there is one rung, at the end.
        """
        if self.max_time is None or self.max_trials is None:
            return 1
        rungs, most = 1, min(self.max_time, self.max_trials)
        while rungs < self.max_rungs and self.divisor**rungs <= most:
            rungs += 1
        return max(int(self.max_time // self.divisor ** (rungs - 1)), 1)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        takes = _TAKES[self.name]
        for key in sorted(given - takes):
            yield key, f"given, but {self.name.value} takes only {', '.join(sorted(takes))}"
        for key in _NEEDS.get(self.name, ()):
            if getattr(self, key) is None:
                yield key, f"missing; {self.name.value} needs it"
        if self.time_metric not in (None, *LENGTH_UNITS):
            yield "time_metric", f"got {self.time_metric}; allowed: {' or '.join(LENGTH_UNITS)}"


def read_searcher(raw: object, problems: list[str]) -> SearcherSettings | None:
    """The `searcher` section; None after appending its mistakes to `problems`."""
    if isinstance(raw, Mapping) and raw.get("bracket_rungs"):
        problems.append(Problem("searcher.bracket_rungs", "is not supported; use max_rungs"))
        return None
    if isinstance(raw, Mapping):  # the length of a trial in Determined's own form
        raw = {key: value for key, value in raw.items() if key != "max_length"}
    return read(SearcherSettings, raw, "searcher", problems)


def check_lengths(experiment: Experiment[Any]) -> None:
    """Check that `adaptive_asha` compares trials of equal length; the platform only warns.

    Args:
        experiment: The experiment of a trial.

    Raises:
        ConfigError: if its length is not `max_time`, or its first validation is after the first
            rung.
    """
    problems: list[str] = []
    raw = experiment.config.get("searcher")
    searcher = read(SearcherSettings, raw, "searcher", problems, strict=False)
    place, training = "hyperparameters.training", experiment.training
    if searcher is not None and searcher.time_metric is not None:
        unit, first = searcher.time_metric, searcher.first_rung()
        if getattr(experiment.max_length, unit) != searcher.max_time:
            text = f"is not searcher.max_time; allowed: {{{unit}: {searcher.max_time}}}"
            problems.append(Problem(f"{place}.max_length", text))
        period = getattr(training.validation_period, unit, None)
        if period is None or period > first:
            text = (
                f"adaptive_asha first compares trials after {first} {unit}; allowed: "
                f"{{{unit}: {first}}} or less"
            )
            problems.append(Problem(f"{place}.validation_period", text))
    if problems:
        raise ConfigError("search", problems)
