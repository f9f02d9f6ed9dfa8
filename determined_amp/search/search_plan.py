"""Reads a search YAML: its searcher, its space, and its trials with their seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem

import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from determined_amp.amp.errors import ConfigError, Problem, Problems, near_name
from determined_amp.amp.fields import Contradictions, read, setting
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.entrypoint import Task
from determined_amp.experiment.experiment import Experiment, experiment_in
from determined_amp.experiment.hyperparameters import TRIAL_SEED, with_power_of_two
from determined_amp.experiment.score_check import check_score
from determined_amp.experiment.sections import Searcher
from determined_amp.experiment.training import LENGTH_UNITS
from determined_amp.runs.run import COMPARED
from determined_amp.search.space import MOST_TRIALS, Space, read_space

optuna.logging.set_verbosity(optuna.logging.ERROR)  # else it logs every trial


@dataclass(frozen=True, kw_only=True)
class GridSearcher(Searcher):
    """The `searcher` section of a grid or a single trial; the names are Determined's.

    Keys that matter only on a cluster are not read. Without a cluster, `--workers` sets
    the number of trials at a time, and all trials are compared with each other.
    """

    # Defaults for the searchers that stop no trial early.
    time_metric, max_time = "batches", math.inf

    name: str = setting()
    metric: str = setting()

    def pruner(self) -> optuna.pruners.BasePruner:
        """The pruner of Optuna, which decides whether a trial stops early."""
        return optuna.pruners.NopPruner()


@dataclass(frozen=True, kw_only=True)
class RandomSearcher(GridSearcher):
    """The `searcher` section of a search over random points."""

    max_trials: int = setting(at_least=1)


@dataclass(frozen=True, kw_only=True)
class AshaSearcher(RandomSearcher):
    """The `searcher` section of a search that stops poor random points early."""

    time_metric: str = setting()  # unit of `max_time`: `batches` or `epochs`
    max_time: int = setting(at_least=1)  # length of a trial that is not stopped early
    divisor: int = setting(4, at_least=2)  # one in this many trials continues at a rung
    # largest number of rungs, the end of a trial included
    max_rungs: int = setting(5, at_least=1)

    def pruner(self) -> optuna.pruners.BasePruner:
        return optuna.pruners.SuccessiveHalvingPruner(self.first_rung(), self.divisor)

    def first_rung(self) -> int:
        """The length, in `time_metric`, at which trials are first compared.

        Each following rung is `divisor` times as long. A trial that is not stopped
        reaches `max_time`.
        """
        rungs, most = 1, min(self.max_time, self.max_trials)
        while rungs < self.max_rungs and self.divisor**rungs <= most:
            rungs += 1
        return max(int(self.max_time // self.divisor ** (rungs - 1)), 1)

    def contradictions(self, fields_set: frozenset[str]) -> Contradictions:
        if self.time_metric not in LENGTH_UNITS:
            yield (
                "time_metric",
                f"got {self.time_metric}; allowed: {' or '.join(LENGTH_UNITS)}",
            )


_METHODS: dict[str, type[GridSearcher]] = {
    "single": GridSearcher,
    "grid": GridSearcher,
    "random": RandomSearcher,
    "adaptive_asha": AshaSearcher,
}


class SearchPlan:
    """A search, read from its YAML and checked as far as possible without torch.

    Args:
        search: The content of the YAML.
        source: The name of the YAML, for the error message.

    Attributes:
        points: The point of each trial, by dotted name. The YAML alone decides it.
        trials: The experiment of each trial, and its searched hyperparameters by dotted
            name.

    Raises:
        ConfigError: naming every mistake.
    """

    def __init__(self, search: Config, source: str = "search") -> None:
        problems = Problems()
        settings = read_searcher(search.get("searcher"), problems)
        # If the searcher is wrong, one random trial shows the other mistakes.
        one = RandomSearcher(name="random", metric="", max_trials=1)
        self.search, self._source, self.settings = search, source, settings or one
        self.task = Task.of(search.get("entrypoint"), problems)
        if self.task.verb not in ("train", "score"):
            text = (
                f"got {search.get('entrypoint')!r}; allowed in a search: python3 -m "
                "determined_amp train, the same with score, or module:Class of a "
                "PyTorchTrial"
            )
            problems.append(Problem("entrypoint", text))
        in_space = Problems()
        self.space = read_space(search.get("hyperparameters"), in_space)
        if self.settings.name == "grid":
            in_space.extend(_mistakes_of_a_grid(self.space))
        if in_space:
            problems.extend(in_space)
            problems.raise_from(source)
        seed = value_at(search, "reproducibility.experiment_seed")
        self._seed = seed if isinstance(seed, int) else 0
        self.points = self._points()
        self.trials: list[tuple[Experiment, Config]] = []
        for point in self.points:
            problems.extend(self._plan_trial(point))
        problems.raise_from(source)

    def _points(self) -> list[Values]:
        if not isinstance(self.settings, RandomSearcher):
            grid = self.space.grid()
            return _by_turns(grid) if self.compares else grid
        sampler = optuna.samplers.RandomSampler(seed=self._seed)
        draws = optuna.create_study(sampler=sampler)
        trials = range(self.settings.max_trials)
        return [draws.ask(self.distributions).params for _ in trials]

    def _plan_trial(self, point: Values) -> Sequence[Problem]:
        """Add the trial at a point, or return what is wrong with it.

        Without a `trial_seed`, every trained trial gets its own seed, drawn from
        `experiment_seed`. The platform does the same, but draws other numbers. All
        scored trials share one seed.
        """
        sampled = with_power_of_two(self.space.nested(point), self.search)
        trains = self.task.verb == "train"
        try:
            made = experiment_in(
                self.search,
                self._source,
                hyperparameters=sampled,
                drawn_seed=self.drawn_seed(len(self.trials)) if trains else None,
                importable=self.trials[-1][0].trial if self.trials else "",
            )
            if self.task.verb == "score":
                check_score(made)
            else:
                _ = made.max_length  # raises if there is none
        except ConfigError as error:
            return error.problems
        axes = self.space.axes
        hparams = {axis.name: reduce(getitem, axis.path, sampled) for axis in axes}
        self.trials.append((made, hparams))
        return ()

    @property
    def compares(self) -> bool:
        """Whether the search compares precisions. Then it ranks nothing."""
        return COMPARED in self.distributions

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Optuna's distribution of each searched hyperparameter, by dotted name."""
        return {axis.name: axis.distribution for axis in self.space.axes}

    def drawn_seed(self, number: int) -> int:
        """A 32-bit seed from the seed of the search and the number of the trial."""
        return int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0])


def read_searcher(raw: object, problems: list[Problem]) -> GridSearcher | None:
    """Read the `searcher` section, and append its mistakes to `problems`.

    Returns:
        The section; None if it cannot be used.
    """
    section = raw if isinstance(raw, Mapping) else {}
    name = str(section.get("name"))
    if name not in _METHODS:
        near = near_name(name, _METHODS, f"; allowed: {', '.join(_METHODS)}")
        problems.append(Problem("searcher.name", f"got {name}{near}"))
        return None
    return read(_METHODS[name], section, "searcher", problems)


def _mistakes_of_a_grid(space: Space) -> Iterator[Problem]:
    for axis in space.axes:
        if not axis.grid:
            yield Problem(
                f"hyperparameters.{axis.name}.count", "missing; a grid needs it"
            )
    if space.grid_size > MOST_TRIALS:
        text = (
            f"this grid has {space.grid_size} points; allowed: at most {MOST_TRIALS}, "
            "by a smaller count of each range, or searcher.name: random"
        )
        yield Problem("hyperparameters", text)


def _by_turns(points: Sequence[Values]) -> list[Values]:
    """Group the points by seed, and reverse the order in every second group.

    A drift of the machine then affects all precisions alike. The platform trains one
    precision after the other.
    """
    ordered: list[Values] = []
    for i, seed in enumerate(dict.fromkeys(point.get(TRIAL_SEED) for point in points)):
        turn = [point for point in points if point.get(TRIAL_SEED) == seed]
        ordered += turn[::-1] if i % 2 else turn
    return ordered
