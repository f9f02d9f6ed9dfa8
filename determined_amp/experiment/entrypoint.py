"""What an experiment runs: a command of this library, or a class; and which trial."""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeGuard

from determined_amp.amp.errors import Problem
from determined_amp.amp.plain_data import Config
from determined_amp.experiment.dotted import value_at

# The default and the limit of `--batches` for `score` and `find`. All batches are in
# memory at once, and a few are enough.
BATCHES, MOST_BATCHES = 4, 1000

# The entrypoint of a trial that `hyperparameters.trial` or `--trial` names.
TRAIN = "python3 -m determined_amp train"

# Matches an entrypoint that Determined itself imports.
_CLASS = re.compile(r"[\w.]+:[\w.]+")

# The names that start this library, as a module or as an installed program.
_PROGRAM = ("determined_amp", "det-amp")

# Determined's own programs, which train the class that `--trial` names.
_LAUNCHER = re.compile(r"determined\.(launch\.\w+|exec\.harness)")

# Only these options matter here. The task itself reads and checks all of its options.
_OPTIONS = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
for _name in ("--trial", "--batches"):
    _OPTIONS.add_argument(_name, nargs="?")


def is_class(entrypoint: object) -> TypeGuard[str]:
    """Whether an entrypoint is `module:Class`."""
    return isinstance(entrypoint, str) and _CLASS.fullmatch(entrypoint) is not None


@dataclass(frozen=True)
class Task:
    """What an entrypoint runs."""

    # The command of this library, such as `train`; empty for another program. A trial
    # class means `train`, and so does a launcher of Determined with `--trial`.
    verb: str = ""
    batches: int = BATCHES  # the option `--batches` of `score` and `find`
    trial: str | None = field(default=None, compare=False)  # the option `--trial`

    @staticmethod
    def of(entrypoint: object, problems: list[Problem]) -> Task:
        """Read an entrypoint. A wrong `--batches` is appended to `problems`."""
        if is_class(entrypoint):
            return Task("train")
        words = _words(entrypoint)
        options, _ = _OPTIONS.parse_known_args(words)
        for word, verb in pairwise([*words, ""]):
            if word in _PROGRAM:
                measures = verb in ("score", "find")
                text = options.batches if measures else None
                return Task(verb, _batches(text, problems), options.trial)
        if options.trial and any(map(_LAUNCHER.fullmatch, words)):
            return Task("train", trial=options.trial)
        return Task()


def _words(entrypoint: object) -> list[str]:
    if isinstance(entrypoint, list):
        return [str(word) for word in entrypoint]
    if isinstance(entrypoint, str):
        with suppress(ValueError):  # a quotation mark without its partner
            return shlex.split(entrypoint)
    return []


def _batches(text: str | None, problems: list[Problem]) -> int:
    """The value of `--batches`; the default if there is none, or a wrong one."""
    if text is None:
        return BATCHES
    if text.isdecimal() and 1 <= int(text) <= MOST_BATCHES:
        return int(text)
    allowed = f"an integer from 1 to {MOST_BATCHES}"
    problems.append(Problem("--batches", f"got {text!r}; allowed: {allowed}"))
    return BATCHES


def named_trial(config: Config) -> tuple[str, str]:
    """The import path of the trial that a configuration names, and the key that has it.

    It is the `--trial` of an entrypoint, else `hyperparameters.trial`, else an
    entrypoint of that form. If nothing names a trial, both are empty.
    """
    entrypoint = config.get("entrypoint")
    if in_entrypoint := Task.of(entrypoint, []).trial:
        return in_entrypoint, "entrypoint"
    name = value_at(config, "hyperparameters.trial")
    if isinstance(name, str):
        return name, "hyperparameters.trial"
    return (entrypoint, "entrypoint") if is_class(entrypoint) else ("", "")


def with_trial(config: Config, trial: str | None) -> Config:
    """A configuration that names this trial; None changes nothing.

    A command of this library stays the entrypoint; any other becomes `train`.
    """
    if trial is None or named_trial(config)[0] == trial:
        return config
    entrypoint = config.get("entrypoint")
    stays = Task.of(entrypoint, []).verb and not is_class(entrypoint)
    start = entrypoint if stays else TRAIN
    words = shlex.join(start) if isinstance(start, list) else start
    return {**config, "entrypoint": f"{words} --trial {shlex.quote(trial)}"}
