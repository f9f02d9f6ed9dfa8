"""The content of a search YAML: its searcher, its space, and the kind and seeds of its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.experiment import TRIAL_SEED, Experiment, parse
from determined_amp.search.searcher_settings import Method, SearcherSettings, read_searcher
from determined_amp.search.space import MOST_TRIALS, Space, read_space
from determined_amp.search.task import Task, Topic, Verb


class SearchPlan:
    """A search, read from its YAML.

    Args:
        search: The content of the YAML.

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
        seed = value_at(search, "reproducibility.experiment_seed")
        if not isinstance(seed, int) or seed < 0:
            text = f"got {seed!r}; allowed: an integer >= 0"
            problems.append(Problem("reproducibility.experiment_seed", text))
        restarts = search.get("max_restarts", 0)
        if not isinstance(restarts, int) or restarts < 0:
            text = f"got {restarts!r}; allowed: an integer >= 0"
            problems.append(Problem("max_restarts", text))
        task = _task_here(search, problems)
        if settings is None or task is None or problems:
            raise ConfigError("search", problems)
        self.search = search
        self.task: Task = task
        self.settings: SearcherSettings = settings
        self._seed: int = int(seed or 0)

    @property
    def compares(self) -> bool:
        """Whether the search compares precisions, so that it ranks nothing."""
        return Topic.of(self.search) is Topic.PRECISIONS

    @property
    def max_restarts(self) -> int:
        """How often a trial whose process died continues."""
        return int(self.search.get("max_restarts", 5))

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

    def experiment(self, number: int, sampled: Mapping[str, Any]) -> Experiment[Any]:
        """The experiment of a trial.

        Without a `trial_seed`, every trained trial gets its own seed, drawn from `experiment_seed`.
        The platform does the same, but draws other numbers. All scored trials share one seed.

        Args:
            number: Number of the trial.
            sampled: A value for every hyperparameter of the search, nested.

        Raises:
            ConfigError: naming every mistake.
        """
        config = self.search
        if self.task.verb is Verb.TRAIN:
            seed = {"experiment_seed": self.drawn_seed(number)}
            config = {**config, "reproducibility": {**config["reproducibility"], **seed}}
        return parse(
            config,
            str(config.get("name", "search")),
            trial=self.task.trial,
            hyperparameters=sampled,
        )

    def drawn_seed(self, number: int) -> int:
        """A 32-bit seed that depends only on the search's seed and the trial's number."""
        return int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0])


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
