"""Errors that a user can fix."""

from __future__ import annotations

import textwrap


class UserError(Exception):
    """An error that a user can fix; programs print its message without a traceback.

    The message says what was given, what is allowed, and what to do.
    """


class GuardError(UserError):
    """The run no longer trains.

    Args:
        message: What happened, why, and what to do.
        state_is_good: Whether the weights are worth a checkpoint.
    """

    def __init__(self, message: str, *, state_is_good: bool) -> None:
        super().__init__(message)
        self.state_is_good = state_is_good


def one_line(value: object) -> str:
    """A text or an error on one line, shortened to 240 characters."""
    return textwrap.shorten(str(value), 240, placeholder=" ...") or type(value).__name__
