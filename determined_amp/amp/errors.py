"""Errors that a user can fix."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable

from determined_amp.amp.plain_data import Metrics


class UserError(Exception):
    """An error that a user can fix; programs print its message without a traceback.

    The message says what was given, what is allowed, and what to do.
    """


class Problem(str):
    """One mistake in a configuration, as a sentence that begins with its key.

    Args:
        key: The dotted key that is wrong; empty if the mistake is not about one key.
        text: What was given, what is allowed, what to do.
    """

    key: str

    def __new__(cls, key: str, text: str) -> Problem:
        problem = super().__new__(cls, f"{key}: {text}" if key else text)
        problem.key = key
        return problem


class ConfigError(UserError, ValueError):
    """All mistakes in one configuration, one per line, the first on the first line.

    Args:
        source: A file, the name of an experiment, or a command-line option.
        problems: The mistakes. A plain string is a mistake without a key.
    """

    def __init__(self, source: str, problems: Iterable[str]) -> None:
        self.problems = tuple(
            p if isinstance(p, Problem) else Problem("", p) for p in problems
        )
        first, *others = self.problems
        several = f" (1 of {len(self.problems)} problems)" if others else ""
        lines = [
            f"{source}: {first}{several}",
            *(f"  - {problem}" for problem in others),
        ]
        super().__init__("\n".join(lines))


class Problems(list[Problem]):
    """The mistakes found so far in a configuration; only the first one per key."""

    def append(self, problem: Problem) -> None:
        if not problem.key or problem.key not in {known.key for known in self}:
            super().append(problem)

    def extend(self, problems: Iterable[Problem]) -> None:
        for problem in problems:
            self.append(problem)

    def raise_from(self, source: str) -> None:
        """Raise a `ConfigError` with this source if there is a mistake."""
        if self:
            raise ConfigError(source, self)


class GuardError(UserError):
    """The run no longer trains.

    Args:
        message: What happened, why, and what to do.
        state_is_good: Whether the weights are worth a checkpoint.
        metrics: The report or the validation metrics that the run ends with.
    """

    def __init__(self, message: str, *, state_is_good: bool, metrics: Metrics) -> None:
        super().__init__(message)
        self.state_is_good = state_is_good
        self.metrics = metrics


def nearest(name: str, names: Iterable[str]) -> str:
    """The name with the most similar spelling; empty if none is similar."""
    near = difflib.get_close_matches(name, [*names], n=1, cutoff=0.75)
    return near[0] if near else ""


def near_name(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """The question "did you mean ...?" if a name is similar, else `otherwise`."""
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else otherwise


def one_line(value: object) -> str:
    """A text or an error on one line, shortened to 240 characters."""
    text = printable(str(value))
    return textwrap.shorten(text, 240, placeholder=" ...") or type(value).__name__


def printable(text: str) -> str:
    """A text without its control characters, which a terminal would obey."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)
