"""The content of a search YAML: its searcher, its space, and the kind and seeds of its trials."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.settings import setting
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.experiment import (
    TRIAL_SEED,
    Experiment,
    Searcher,
    check,
    parse,
)
from determined_amp.experiment.fields import read
from determined_amp.experiment.training import LENGTH_UNITS
from determined_amp.finder.score_metrics import check_score
from determined_amp.search.space import MOST_TRIALS, Space, read_space
from determined_amp.search.task import Task, Topic, Verb

optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would log every study and trial


_SCALE = "amp.init_scale"


class Method(str, enum.Enum):
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


@dataclass(frozen=True, kw_only=True)
class SearcherSettings(Searcher):
    """The `searcher` section of a search; the names are Determined's."""

    name: Method = setting()
    metric: str = setting()
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

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        takes = _TAKES[self.name]
        for key in sorted(fields_set - takes):
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


class SearchPlan:
    """A search, read from its YAML.

    Raises:
        ConfigError: naming every mistake in its searcher and its spaces.
    """

    def __init__(self, search: Mapping[str, Any]) -> None:
        problems: list[str] = []
        settings = read_searcher(search.get("searcher"), problems)
        grid = settings is not None and settings.name is Method.GRID
        self.space: Space = read_space(search.get("hyperparameters"), problems, grid=grid)
        if grid and self.space.grid_size > MOST_TRIALS:
            text = (
                f"this grid has {self.space.grid_size} points; allowed: at most {MOST_TRIALS}, by "
                "a smaller count of each range, or searcher.name: random"
            )
            problems.append(Problem("hyperparameters", text))
        seed = value_at(search, "reproducibility.experiment_seed") or 0
        restarts = search.get("max_restarts", 5)
        for key, value in (("reproducibility.experiment_seed", seed), ("max_restarts", restarts)):
            if not isinstance(value, int) or value < 0:
                problems.append(Problem(key, f"got {value!r}; allowed: an integer >= 0"))
        task = _task_here(search, problems)
        if settings is None or task is None or problems:
            raise ConfigError("search", problems)
        self.search = search
        self.task: Task = task
        self.settings: SearcherSettings = settings
        # How often a trial may continue after its process has died.
        self.max_restarts: int = restarts
        self._seed: int = seed

    def check_trial(self) -> None:
        """Check what only the class of the trial knows, at the ends of all ranges.

        Raises:
            ConfigError: naming every mistake of the first trial that has one.
        """
        for probe in self.space.probes():
            self.experiment(0, self.space.nested(probe))

    @property
    def compares(self) -> bool:
        """Whether the search compares precisions, so that it ranks nothing."""
        return Topic.of(self.search) is Topic.PRECISIONS

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distribution of each searched hyperparameter, by dotted name."""
        return {axis.name: axis.distribution for axis in self.space.axes}

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """The point of each trial, by dotted name; they depend on the YAML alone."""
        if self.settings.name is Method.GRID:
            grid = self.space.grid()
            return _by_turns(grid) if self.compares else grid
        sampler = optuna.samplers.RandomSampler(seed=self._seed)
        draws = optuna.create_study(sampler=sampler)
        trials = range(self.settings.max_trials or 1)
        return [dict(draws.ask(self.distributions).params) for _ in trials]

    def pruner(self) -> optuna.pruners.BasePruner:
        """The early stopping of the search."""
        settings = self.settings
        if settings.name is not Method.ADAPTIVE_ASHA:
            return optuna.pruners.NopPruner()
        return optuna.pruners.SuccessiveHalvingPruner(settings.first_rung(), settings.divisor)

    def experiment(self, number: int, sampled: Mapping[str, Any]) -> Experiment:
        """The experiment of a trial, with nested values of its hyperparameters.

        Without a `trial_seed`, every trained trial gets its own seed, drawn from `experiment_seed`.
        The platform does the same, but draws other numbers. All scored trials share one seed.

        Raises:
            ConfigError: naming every mistake.
        """
        config = self.search
        if self.task.verb is Verb.TRAIN:
            seed = {"experiment_seed": self.drawn_seed(number)}
            given = config.get("reproducibility") or {}
            config = {**config, "reproducibility": {**given, **seed}}
        return parse(config, str(config.get("name", "search")), hyperparameters=sampled)

    def trial(self, number: int) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The configuration of a trial, and its searched hyperparameters by dotted name."""
        sampled = self.space.nested(self.points[number])
        config = self.experiment(number, sampled).config
        hparams = {axis.name: value_at(sampled, axis.name) for axis in self.space.axes}
        if _SCALE in hparams:  # the sampled scale is rounded to a power of two
            hparams[_SCALE] = value_at(config["hyperparameters"], _SCALE)
        return config, hparams

    def drawn_seed(self, number: int) -> int:
        """A 32-bit seed that depends only on the search's seed and the trial's number."""
        return int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0])


def check_search(search: Mapping[str, Any], source: str) -> None:
    """Check all of a search that can be checked without its trial, and without torch.

    It checks the trials at the ends of all ranges: many others would share their mistakes.

    Raises:
        ConfigError: naming every mistake.
    """
    problems: list[str] = []
    try:
        SearchPlan(search)
    except ConfigError as error:
        problems.extend(error.problems)
    in_space: list[str] = []
    space = read_space(search.get("hyperparameters"), in_space, grid=False)
    for probe in () if in_space else space.probes():
        try:
            _check_probe(search, space.nested(probe))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(source, list(dict.fromkeys(problems)))


def _check_probe(search: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> None:
    """Check one trial; what is wrong with the searcher or the entrypoint is named elsewhere."""
    experiment = check(search, "search", hyperparameters=hyperparameters)
    task, settings = _task_here(search, []), read_searcher(search.get("searcher"), [])
    if task is not None and task.verb is Verb.SCORE:
        check_score(experiment)
    elif settings is not None:
        problems = list(unequal_lengths(experiment, settings))
        if problems:
            raise ConfigError("search", problems)


def unequal_lengths(experiment: Experiment, searcher: SearcherSettings) -> Iterator[Problem]:
    """Problems of a trial that `adaptive_asha` cannot compare with others; the platform only warns.

    Its length must be `max_time`, and its first validation not after the first rung.
    """
    training = experiment.training
    if searcher.time_metric is None:
        return
    unit, first = searcher.time_metric, searcher.first_rung()
    if getattr(experiment.max_length, unit) != searcher.max_time:
        text = f"is not searcher.max_time; allowed: {{{unit}: {searcher.max_time}}}"
        yield Problem(experiment.key_of("max_length"), text)
    period = getattr(training.validation_period, unit, None)
    if period is None or period > first:
        text = (
            f"adaptive_asha first compares trials after {first} {unit}; allowed: "
            f"{{{unit}: {first}}} or less"
        )
        yield Problem(experiment.key_of("validation_period"), text)


def _task_here(search: Mapping[str, Any], problems: list[str]) -> Task | None:
    """The task of the trials of a search; None after appending a mistake to `problems`."""
    try:
        task = Task.of(search)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    if task is not None and task.verb in (Verb.TRAIN, Verb.SCORE):
        return task
    text = (
        f"got {search.get('entrypoint')!r}; allowed in a search: python3 -m determined_amp train, "
        "the same with score, or module:Class of a PyTorchTrial"
    )
    problems.append(Problem("entrypoint", text))
    return None


def _by_turns(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points grouped by seed, with the order reversed in every second group.

    This way a drift of the machine affects all precisions alike. The platform trains one precision
    after the other.
    """
    by_seed: dict[Any, list[dict[str, Any]]] = {}
    for point in points:
        by_seed.setdefault(point.get(TRIAL_SEED), []).append(point)
    turns = enumerate(by_seed.values())
    return [point for i, turn in turns for point in (turn[::-1] if i % 2 else turn)]
