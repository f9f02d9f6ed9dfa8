"""How programs print the errors that a user can fix."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from determined_amp.amp.errors import UserError, one_line, printable

# A log policy in the YAMLs matches these words, so the cluster does not restart the trial.
NO_RETRY = "no retry can help: "


_OURS = (str(Path(__file__).parents[1]), sys.base_prefix, "<")

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
    except (MemoryError, RuntimeError, TypeError) as error:  # a TypeError for a size above 2^63
        if _NO_KERNEL.search(str(error)):
            raise UserError(
                f"this device cannot compute an operation in 16 bits: {one_line(error)}; allowed: "
                "amp.precision amp_bf16 (instead of amp_fp16) or fp32, or a GPU"
            ) from error
        if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        raise UserError(
            f"not enough memory: {one_line(error)}{_place(error)}; allowed: smaller sizes, of the "
            "batch (hyperparameters.global_batch_size), the model or the data"
        ) from error


def _place(error: BaseException) -> str:
    """The last line of the user's own code that an error has come through; empty without one."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith((sys.prefix, *_OURS))]
    return f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""


@contextmanager
def translating_exits() -> Iterator[None]:
    """Raise a `UserError` for a trial that calls `sys.exit`: status 0 would say that it trained."""
    try:
        yield
    except SystemExit as left:
        if type(left) is not SystemExit:  # one of ours
            raise
        raise UserError(
            f"the trial called sys.exit({left.code!r}); allowed: an exception if it failed, "
            "context.set_stop_requested(True) to stop early"
        ) from left


@contextmanager
def faults_of_the_trial() -> Iterator[None]:
    """Raise a `UserError` in one sentence for what a trial meets that a user can mend.

    Besides the limits of the machine and exits this is a `UserError` in a process that loads data,
    into whose text torch puts the whole traceback.
    """
    try:
        with limits_of_the_machine(), translating_exits():
            yield
    except UserError as error:
        name = f"{type(error).__module__}.{type(error).__qualname__}: "
        _, of_a_worker, message = str(error).rpartition(f"\n{name}")
        if not of_a_worker:
            raise
        raise type(error)(message.strip()) from error


def exit_status(run: Callable[[], int], before: str) -> int:
    """The result of `run`, or 2 after a `UserError`, which is printed after the text `before`."""
    try:
        return run()
    except UserError as error:
        print(f"{before}{printable(str(error))}", file=sys.stderr, flush=True)
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


@contextmanager
def ending_the_program() -> Iterator[None]:
    """Let a `UserError` that leaves this block end the program, unless somebody catches it.

    Its end is one line and exit status 2. Python asks `sys.excepthook` about an error that nobody
    has caught, so that is replaced now, and not before there is such an error.
    """
    try:
        yield
    except UserError:
        _print_uncaught_user_errors()
        raise


def _print_uncaught_user_errors() -> None:
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
