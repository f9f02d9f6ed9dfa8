"""The base of every error that a user can fix, and how a program prints one."""

from __future__ import annotations

import sys
from collections.abc import Callable
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


# The YAMLs have a log policy on these words: the cluster does not start the trial again.
NO_RETRY = "no retry can help: "


def exit_status(run: Callable[[], int], before: str) -> int:
    """What `run` returns; or 2, with what a user can fix printed without a traceback.

    Args:
        run: The program.
        before: Printed before the error.
    """
    try:
        return run()
    except UserError as error:
        print(f"{before}{error}", file=sys.stderr, flush=True)
        return 2


def print_uncaught_user_errors() -> None:
    """From now on a program that ends by a `UserError` prints one line, and exits with status 2."""
    if getattr(sys.excepthook, "__module__", None) == __name__:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        print(f"{NO_RETRY}{error}", file=sys.stderr, flush=True)
        raise SystemExit(2)  # Python takes the exit status from what its hook raises

    sys.excepthook = hook
