"""What each trial of a search does: the command in the entrypoint of its YAML, and its options."""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.experiment.dotted import flat, value_at
from determined_amp.runs.run import is_scale

# How many batches are scored, or used by the finder, without `--batches`.
BATCHES = 4


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
    trial: str | None = None  # the option `--trial`; None if the configuration names the trial
    batches: int = BATCHES  # the option `--batches` of `score` and `find`

    @staticmethod
    def of(config: Mapping[str, Any]) -> Task | None:
        """The task of an experiment; None if its entrypoint runs another program.

        Raises:
            ConfigError: if it is no command, or `--batches` is not a number that can be used.
        """
        words = _words_of(config.get("entrypoint") or "")
        if len(words) == 1 and ":" in words[0]:
            return Task(Verb.TRAIN)
        at = words.index("determined_amp") + 1 if "determined_amp" in words else len(words)
        verb = next((verb for verb in Verb if [verb.value] == words[at : at + 1]), None)
        if verb is None:
            return None
        options = dict(_options(words[at + 1 :]))
        if verb in (Verb.TRAIN, Verb.COMPARE, Verb.CHECK):
            return Task(verb, options.get("--trial"))
        return Task(
            verb,
            options.get("--trial"),
            _batches(options["--batches"]) if "--batches" in options else BATCHES,
        )


class Topic(enum.Enum):
    """What an experiment, a search or a run is about."""

    FINDING = enum.auto()
    PRECISIONS = enum.auto()
    LOSS_SCALES = enum.auto()
    SINGLE_RUN = enum.auto()
    OTHER_SEARCH = enum.auto()

    @staticmethod
    def of(config: Mapping[str, Any]) -> Topic:
        """The topic of a configuration; an empty one is that of a run folder."""
        task = Task.of(config)
        verb = None if task is None else task.verb
        values = flat(config.get("hyperparameters") or {})
        searched = [name for name, value in values.items() if isinstance(value, Mapping)]
        if verb is Verb.FIND:
            return Topic.FINDING
        if verb is Verb.COMPARE or "amp.precision" in searched:
            return Topic.PRECISIONS
        if verb is Verb.SCORE or any(map(is_scale, searched)):
            return Topic.LOSS_SCALES
        is_single = value_at(config, "searcher.name") in (None, "single")
        return Topic.SINGLE_RUN if is_single else Topic.OTHER_SEARCH


def _words_of(entrypoint: object) -> list[str]:
    words = entrypoint
    if isinstance(entrypoint, str):
        with suppress(ValueError):  # a quotation mark without its partner
            words = shlex.split(entrypoint)
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return words
    problem = f"got {entrypoint!r}; allowed: a command, as a text or a list of words"
    raise ConfigError("experiment", [Problem("entrypoint", problem)])


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """The options `--name value` and `--name=value`."""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        name, equals, after = word.partition("=")
        if name.startswith("--"):
            yield name, after if equals else value


def _batches(text: str) -> int:
    from determined_amp.finder.frozen import MOST_BATCHES  # noqa: PLC0415  # torch

    if not (text.isdecimal() and 1 <= int(text) <= MOST_BATCHES):
        problem = f"got {text!r}; allowed: an integer from 1 to {MOST_BATCHES}"
        raise ConfigError("entrypoint", [Problem("--batches", problem)])
    return int(text)
