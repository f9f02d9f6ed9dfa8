"""The content of a search YAML: its searcher, its space, and the kind and seeds of its trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.experiment import TRIAL_SEED, Experiment, parse
from determined_amp.experiment.settings import ConfigError
from determined_amp.search.searcher_settings import (
    Bracket,
    Method,
    SearcherSettings,
    brackets,
    read_searcher,
)
from determined_amp.search.space import MOST_TRIALS, Space, read_space
from determined_amp.search.task import Task, Verb


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
            problems.append(
                f"hyperparameters: this grid has {self.space.grid_size} points; allowed: at most "
                f"{MOST_TRIALS}, by a smaller count of each range, or searcher.name: random"
            )
        seed = value_at(search, "reproducibility.experiment_seed")
        if not isinstance(seed, int) or seed < 0:
            problems.append(
                f"reproducibility.experiment_seed: got {seed!r}; allowed: an integer >= 0"
            )
        restarts = search.get("max_restarts", 0)
        if not isinstance(restarts, int) or restarts < 0:
            problems.append(f"max_restarts: got {restarts!r}; allowed: an integer >= 0")
        task = _task_here(search, problems)
        if settings is None or task is None or problems:
            raise ConfigError("search", problems)
        self.search = search
        self.task: Task = task
        self.settings: SearcherSettings = settings
        self._seed: int = int(seed or 0)
        self.grid = self.space.grid() if grid else []
        if self.compares:
            self.grid = _by_turns(self.grid)
        self.brackets: list[Bracket] = (
            brackets(settings)
            if settings.name is Method.ADAPTIVE_ASHA
            else [Bracket((), len(self.grid) or settings.max_trials or 1)]
        )

    @property
    def compares(self) -> bool:
        """Whether the search compares precisions, so that it ranks nothing."""
        return any(axis.name == "amp.precision" for axis in self.space.axes)

    @property
    def total(self) -> int:
        """The number of trials, not counting invalid ones that are replaced."""
        return sum(bracket.max_trials for bracket in self.brackets)

    @property
    def replaces_invalid(self) -> bool:
        """Whether a trial that cannot train is replaced by another one, as on the platform."""
        return self.settings.name in (Method.RANDOM, Method.ADAPTIVE_ASHA)

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
            seed = {"experiment_seed": self.drawn(number, 1)}
            config = {**config, "reproducibility": {**config["reproducibility"], **seed}}
        return parse(
            config,
            str(config.get("name", "search")),
            trial=self.task.trial,
            hyperparameters=sampled,
        )

    def drawn(self, number: int, stream: int) -> int:
        """A 32-bit random number that depends only on the search's seed and the arguments."""
        return int(np.random.SeedSequence((self._seed, number, stream)).generate_state(1)[0])


def _task_here(search: Mapping[str, Any], problems: list[str]) -> Task | None:
    """The task of the trials of a search; None after appending a mistake to `problems`."""
    try:
        task = Task.of(search)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    if task is not None and task.verb in (Verb.TRAIN, Verb.SCORE):
        return task
    problems.append(
        f"entrypoint: got {search.get('entrypoint')!r}; allowed in a search: python3 -m "
        "determined_amp train, the same with score, or module:Class of a PyTorchTrial"
    )
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
