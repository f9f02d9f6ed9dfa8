"""Reads the entrypoint of an experiment: a command of this library, or a class."""

from __future__ import annotations

import argparse
import re
import shlex
from contextlib import suppress
from itertools import pairwise
from typing import TypeGuard

# The default and the limit of `--batches` for `score` and `find`. All batches are in
# memory at once, and a few are enough.
BATCHES, MOST_BATCHES = 4, 1000

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


def command_in(entrypoint: object) -> tuple[str, argparse.Namespace]:
    """The command of this library that an entrypoint runs, and its options `trial` and
    `batches`.

    Returns:
        The command is `train` for a launcher of Determined with `--trial`, and empty
            for any other program. An option without a value is None.
    """
    words: list[str] = []
    if isinstance(entrypoint, list):
        words = [str(word) for word in entrypoint]
    elif isinstance(entrypoint, str):
        with suppress(ValueError):  # a quotation mark without its partner
            words = shlex.split(entrypoint)
    options, _ = _OPTIONS.parse_known_args(words)
    for word, command in pairwise([*words, ""]):
        if word in _PROGRAM:
            return command, options
    if options.trial and any(map(_LAUNCHER.fullmatch, words)):
        return "train", options
    return "", _OPTIONS.parse_args([])
