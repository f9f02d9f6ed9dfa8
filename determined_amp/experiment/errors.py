"""The base class of errors that a user can fix, and how programs print them."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType


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


# A log policy in the YAMLs matches these words, so the cluster does not restart the trial.
NO_RETRY = "no retry can help: "


def one_line(value: object) -> str:
    """A text or an error on one line, shortened to 240 characters."""
    return textwrap.shorten(str(value), 240, placeholder=" ...") or type(value).__name__


# RuntimeError messages of torch and numpy about sizes that do not fit in memory.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|Storage size calculation overflowed"
    r"|negative dimension|Overflow when unpacking long",
    re.IGNORECASE,
)


# Those of operations that a device has no kernel for; a CPU has none for an LSTM in float16.
_NO_KERNEL = re.compile(r"could not create a primitive|not implemented for '(Half|BFloat16)'")


@contextmanager
def limits_of_the_machine() -> Iterator[None]:
    """Raise a `UserError` for sizes that do not fit in memory, and for a kernel that is missing."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if _NO_KERNEL.search(str(error)):
            raise UserError(
                f"this device cannot compute an operation in 16 bits: {one_line(error)}; allowed: "
                "amp.precision amp_bf16 (instead of amp_fp16) or fp32, or a GPU"
            ) from error
        if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        raise UserError(
            f"not enough memory: {one_line(error)}; allowed: smaller sizes, of the batch "
            "(hyperparameters.global_batch_size), the model or the data"
        ) from error


def exit_status(run: Callable[[], int], before: str) -> int:
    """The result of `run`, or 2 after a `UserError`, which is printed without a traceback.

    Args:
        run: The program; returns its exit status.
        before: Text before the error's message.
    """
    try:
        return run()
    except UserError as error:
        print(f"{before}{error}", file=sys.stderr, flush=True)
        _report_to_launcher(f"{before}{error}")
        return 2


def _report_to_launcher(reason: str) -> None:
    """Make torchrun's report end with the reason; the report is long and hides earlier output."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    extra = {"py_callstack": reason, "timestamp": str(int(time.time()))}
    with suppress(OSError), open(file, "w", encoding="utf-8") as report:
        json.dump({"message": {"message": reason, "extraInfo": extra}}, report)


def print_uncaught_user_errors() -> None:
    """Make this process print an uncaught `UserError` in one line and exit with status 2."""
    if getattr(sys.excepthook, "__module__", None) == __name__:
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        print(f"{NO_RETRY}{error}", file=sys.stderr, flush=True)
        _report_to_launcher(f"{NO_RETRY}{error}")
        raise SystemExit(2)  # Python takes the exit status from the hook's exception

    sys.excepthook = hook
