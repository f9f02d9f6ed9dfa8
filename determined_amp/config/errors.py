"""The base of every error that a user can fix, and how a program prints one."""

from __future__ import annotations

import sys
from types import TracebackType


class UserError(Exception):
    """Said in one message without a traceback: what was given, what is allowed, what to do."""


class GuardError(UserError):
    """The run no longer trains.

    Args:
        message: What was seen, why, and what to do.
        state_is_good: Whether the weights are worth a checkpoint.
    """

    def __init__(self, message: str, *, state_is_good: bool) -> None:
        super().__init__(message)
        self.state_is_good = state_is_good


def say(error: UserError) -> None:
    """Print an error that no restart can help.

    The YAMLs have a log policy on these words: the cluster does not start the trial again.
    """
    print(f"no retry can help: {error}", file=sys.stderr, flush=True)


def say_uncaught_ones() -> None:
    """From now on a program that ends by a `UserError` prints one line, and exits with status 2."""
    if getattr(sys.excepthook, "__module__", None) == __name__:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        say(error)
        raise SystemExit(2)  # Python takes the exit status from what its hook raises

    sys.excepthook = hook
