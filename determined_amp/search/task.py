"""What each trial of a search does: the command in the entrypoint of its YAML, and its
options.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.plain_data import Config
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.entrypoint import (
    BATCHES,
    MOST_BATCHES,
    command_in,
    is_class,
)
from determined_amp.experiment.experiment import ranges
from determined_amp.runs.run import SCALE


class Verb(enum.Enum):
    """A command of this library that can be the entrypoint of an experiment."""

    TRAIN = "train"
    SCORE = "score"
    FIND = "find"
    COMPARE = "compare"
    CHECK = "check"


@dataclass(frozen=True)
class Task:
    """The entrypoint of an experiment."""

    # The command. Determined's own entrypoint of a trial class trains, too.
    verb: Verb
    batches: int = BATCHES  # the option `--batches` of `score` and `find`

    @staticmethod
    def of(config: Config) -> Task | None:
        """The task of an experiment; None if its entrypoint runs another program.

        Raises:
            ConfigError: if `--batches` is not a number that can be used.
        """
        entrypoint = config.get("entrypoint")
        if is_class(entrypoint):
            return Task(Verb.TRAIN)
        command, options = command_in(entrypoint)
        verb = next((verb for verb in Verb if verb.value == command), None)
        if verb is None:
            return None
        counts = verb in (Verb.SCORE, Verb.FIND) and options.batches is not None
        return Task(verb, _batches(options.batches) if counts else BATCHES)


class Topic(enum.Enum):
    """What an experiment, a search or a run is about."""

    FINDING = enum.auto()
    CHECK = enum.auto()
    COMPARISON = enum.auto()  # by the command `compare` on a cluster, in one task
    PRECISIONS = enum.auto()
    LOSS_SCALES = enum.auto()
    SINGLE_RUN = enum.auto()
    OTHER_SEARCH = enum.auto()

    @staticmethod
    def of(config: Config) -> Topic:
        """The topic of a configuration; an empty one is that of a run folder."""
        task = Task.of(config)
        verb = None if task is None else task.verb
        if verb in _TOPICS:
            return _TOPICS[verb]
        searched = list(ranges(config.get("hyperparameters") or {}))
        if "hyperparameters.amp.precision" in searched:
            return Topic.PRECISIONS
        if verb is Verb.SCORE or f"hyperparameters.{SCALE}" in searched:
            return Topic.LOSS_SCALES
        is_single = value_at(config, "searcher.name") in (None, "single")
        return Topic.SINGLE_RUN if is_single else Topic.OTHER_SEARCH


_TOPICS = {
    Verb.FIND: Topic.FINDING,
    Verb.CHECK: Topic.CHECK,
    Verb.COMPARE: Topic.COMPARISON,
}


def _batches(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST_BATCHES):
        problem = f"got {text!r}; allowed: an integer from 1 to {MOST_BATCHES}"
        raise ConfigError("entrypoint", [Problem("--batches", problem)])
    return int(text)
