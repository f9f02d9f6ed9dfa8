"""What each trial of a search does: the command in the entrypoint of its YAML, and its
options.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.plain_data import Config
from determined_amp.experiment.entrypoint import (
    BATCHES,
    MOST_BATCHES,
    command_in,
    is_class,
)


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


def _batches(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= MOST_BATCHES):
        problem = f"got {text!r}; allowed: an integer from 1 to {MOST_BATCHES}"
        raise ConfigError("entrypoint", [Problem("--batches", problem)])
    return int(text)
