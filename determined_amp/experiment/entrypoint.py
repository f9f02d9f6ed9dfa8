"""The entrypoint of an experiment: a command of this library, or a trial class."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeGuard

# Matches an entrypoint that Determined itself imports.
_CLASS = re.compile(r"[\w.]+:[\w.]+")


def is_class(entrypoint: object) -> TypeGuard[str]:
    """Whether an entrypoint is `module:Class`."""
    return isinstance(entrypoint, str) and _CLASS.fullmatch(entrypoint) is not None


def command_in(entrypoint: object) -> tuple[str, dict[str, str]]:
    """The command of this library that an entrypoint runs, and its options by name.

    Returns:
        An empty command if it runs another program, or is no command.
    """
    words: list[str] = []
    if isinstance(entrypoint, list):
        words = [str(word) for word in entrypoint]
    elif isinstance(entrypoint, str):
        with suppress(ValueError):  # a quotation mark without its partner
            words = shlex.split(entrypoint)
    at = words.index("determined_amp") + 1 if "determined_amp" in words else len(words)
    return "".join(words[at : at + 1]), dict(_options(words[at + 1 :]))


def trial_in(entrypoint: object) -> str | None:
    """The trial that a command in an entrypoint names by `--trial`."""
    return command_in(entrypoint)[1].get("--trial")


def _options(words: list[str]) -> Iterator[tuple[str, str]]:
    """The options `--name value` and `--name=value`."""
    for word, value in zip(words, [*words[1:], ""], strict=False):
        name, equals, after = word.partition("=")
        if name.startswith("--"):
            yield name, after if equals else value
