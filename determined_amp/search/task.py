"""Reads what each trial of a search does from the entrypoint of the YAML."""

from __future__ import annotations

from dataclasses import dataclass

from determined_amp.amp.errors import Problem
from determined_amp.amp.plain_data import Config
from determined_amp.experiment.entrypoint import (
    BATCHES,
    MOST_BATCHES,
    command_in,
    is_class,
)


@dataclass(frozen=True)
class Task:
    """The entrypoint of an experiment."""

    # The command of this library, such as `train`; empty for another program. An
    # entrypoint that names a trial class means `train`.
    verb: str
    batches: int = BATCHES  # the option `--batches` of `score` and `find`

    @staticmethod
    def of(config: Config, problems: list[Problem]) -> Task:
        """The task of an experiment.

        A wrong `--batches` is appended to `problems`.
        """
        entrypoint = config.get("entrypoint")
        if is_class(entrypoint):
            return Task("train")
        verb, options = command_in(entrypoint)
        text = options.batches
        if verb not in ("score", "find") or text is None:
            return Task(verb)
        if not (text.isdecimal() and 1 <= int(text) <= MOST_BATCHES):
            allowed = f"an integer from 1 to {MOST_BATCHES}"
            problems.append(Problem("--batches", f"got {text!r}; allowed: {allowed}"))
            return Task(verb)
        return Task(verb, int(text))
