"""Explains the errors that a user can fix, and ends programs with one line."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from determined_amp.amp.errors import (
    ConfigError,
    Problem,
    UserError,
    one_line,
    printable,
)
from determined_amp.amp.users_code import is_users

# A log policy in the YAMLs matches these words, so the cluster does not restart the
# trial.
_NO_RETRY = "no retry can help: "

# A command or a trial needs the number of samples in a batch, and the YAML lacks it.
MISSING_BATCH_SIZE = Problem(
    "hyperparameters.global_batch_size",
    "missing; allowed: the number of samples in a batch, over all slots, for instance "
    "by --config hyperparameters.global_batch_size=32",
)

# Determined's message if a trial asks its context for a batch size that is not set.
_NO_BATCH_SIZE = "batch_size is undefined in this Trial"

# The errors of a disk that is full or broken, whichever file they are about.
OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

# Torch's names of 16-bit dtypes in its messages; `scatter` has a message of its own.
_IN_16_BITS = re.compile(
    r"\b(torch\.b?float16|BFloat16|(Complex)?Half)\b|HalfTensor|could not create a"
    r" primitive"
    r"|Expected self\.dtype to be equal to src\.dtype"
)

# The ways in which an operation in 16 bits can fail, by name: the pattern of torch's
# message, our words, and what to write. The first pattern that fits counts.
_FAULTS_IN_16_BITS = {
    "beyond_float16": (
        re.compile("without overflow"),
        "a number is beyond float16, which ends at 65504",
        (
            "torch.finfo(x.dtype).min in place of a constant such as -1e9,"
            " amp.precision amp_bf16, or amp.fp32_modules with the module that"
            " computes it"
        ),
    ),
    "no_16_bit_kernel": (
        re.compile(
            r"not implemented for|not supported|unsupported|only supported|create a"
            r" primitive"
            r"|but got BFloat16 and"
        ),
        (
            "this device cannot compute an operation in 16 bits (nor can NumPy in "
            "bfloat16)"
        ),
        (
            "amp.precision amp_bf16 (instead of amp_fp16) or fp32, .float() before the "
            "operation, as in x.float().numpy(), amp.fp32_modules with the module that "
            "computes it, or a GPU if only this device lacks it"
        ),
    ),
    "mixed_dtypes": (
        re.compile(
            r"same|match|[Ee]xpected|must have the type|can't be cast|invalid gradient"
        ),
        (
            "an operation gets a 16-bit tensor that autocast made together with one of "
            "another dtype"
        ),
        (
            "one dtype for both, as in value.to(other.dtype), or amp.fp32_modules with"
            " the module that computes it"
        ),
    ),
}


@contextmanager
def faults_of_the_trial() -> Iterator[None]:
    """Raise a `UserError` of one sentence for an error of a trial that a user can fix.

    A user can fix code that runs in float32 but not under autocast, a batch size that
    the YAML lacks, and a `UserError` from a loader process, to which torch adds the
    whole traceback. A user can also fix `sys.exit`: its status 0 would claim success.
    """
    try:
        yield
    except UserError as error:
        name = f"{type(error).__module__}.{type(error).__qualname__}: "
        _, of_a_worker, message = str(error).rpartition(f"\n{name}")
        if not of_a_worker:
            raise
        raise type(error)(message.strip()) from error
    except SystemExit as left:
        raise UserError(
            f"the trial called sys.exit({left.code!r}); allowed: an exception if it "
            "failed, context.set_stop_requested(True) to stop early"
        ) from left
    except (RuntimeError, TypeError, ValueError) as error:
        if _NO_BATCH_SIZE in str(error):
            raise ConfigError("the trial", [MISSING_BATCH_SIZE]) from error
        fault = fault_in_16_bits(error)
        if fault is None:
            raise
        raise UserError(fault) from error


def fault_in_16_bits(error: Exception) -> str | None:
    """Say why code runs in float32 but not under autocast, and what to write.

    None if the error has nothing to do with 16 bits, or if the user's own code raises
    it.
    """
    name = None if isinstance(error, UserError) else name_in_16_bits(str(error))
    if name is None:
        return None
    place, frames = "", traceback.extract_tb(error.__traceback__)
    for frame in frames:
        if is_users(frame.filename):
            place = f" ({frame.filename}, line {frame.lineno})"
            if frame is frames[-1] and str(frame.line).startswith(
                ("raise ", "assert ")
            ):
                return None
    _, fault, remedy = _FAULTS_IN_16_BITS[name]
    return f"{fault}: {one_line(error)}{place}; allowed: {remedy}"


def name_in_16_bits(message: str) -> str | None:
    """The fault that a message is about: `beyond_float16`, `no_16_bit_kernel`,
    `mixed_dtypes`, or None.
    """
    if _IN_16_BITS.search(message):
        for name, (words, _, _) in _FAULTS_IN_16_BITS.items():
            if words.search(message):
                return name
    return None


def is_task() -> bool:
    """Whether this process is the task of a trial on a cluster."""
    return os.environ.get("DET_TASK_TYPE") == "TRIAL"


def print_failure(error: UserError) -> None:
    """Print why the program ends. In a task, begin with the words that keep a cluster
    from a retry.
    """
    before = _NO_RETRY if is_task() else "error: "
    print(f"{before}{printable(str(error))}", file=sys.stderr, flush=True)


@contextmanager
def ending_the_program() -> Iterator[None]:
    """Let a `UserError` that leaves this block end the program, unless it is caught.

    The program then prints one line and exits with status 2. Python passes an uncaught
    error to `sys.excepthook`. We replace that hook only after such an error.
    """
    try:
        yield
    except UserError:
        print_uncaught_user_errors()
        raise


def print_uncaught_user_errors() -> None:
    """End the program with one line if a `UserError` is not caught."""
    if getattr(sys.excepthook, "__module__", None) == __name__:
        return
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        print_failure(error)
        raise SystemExit(2)  # Python takes the exit status from the hook's exception

    sys.excepthook = hook
