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

AT_A_PROMPT = "error: "

_OURS = (str(Path(__file__).parents[1]), sys.base_prefix, "<")

# RuntimeError messages of torch and numpy about sizes that do not fit in memory.
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|Storage size calculation overflowed"
    r"|negative dimension|Overflow when unpacking long",
    re.IGNORECASE,
)

# Torch's names of 16-bit dtypes in its messages; `scatter` has a message of its own.
_IN_16_BITS = re.compile(
    r"\b(torch\.b?float16|BFloat16|(Complex)?Half)\b|HalfTensor|could not create a primitive"
    r"|Expected self\.dtype to be equal to src\.dtype"
)

# Why an operation in 16 bits can fail, by name; the first whose pattern fits counts. Each has the
# pattern of torch's words, our words, and what to write.
_FAULTS_IN_16_BITS = {
    "beyond_float16": (
        re.compile("without overflow"),
        "a number is beyond float16, which ends at 65504",
        "torch.finfo(x.dtype).min in place of a constant such as -1e9, amp.precision amp_bf16, or "
        "amp.fp32_modules with the module that computes it",
    ),
    "no_16_bit_kernel": (
        re.compile(
            r"not implemented for|not supported|unsupported|only supported|create a primitive"
            r"|but got BFloat16 and"
        ),
        "this device cannot compute an operation in 16 bits (nor can NumPy in bfloat16)",
        "amp.precision amp_bf16 (instead of amp_fp16) or fp32, .float() before the operation, as "
        "in x.float().numpy(), amp.fp32_modules with the module that computes it, or a GPU if only "
        "this device lacks it",
    ),
    "mixed_dtypes": (
        re.compile(r"same|match|[Ee]xpected|must have the type|can't be cast|invalid gradient"),
        "an operation gets a 16-bit tensor that autocast made together with one of another dtype",
        "one dtype for both, as in value.to(other.dtype), or amp.fp32_modules with the module that "
        "computes it",
    ),
}


@contextmanager
def limits_of_the_machine() -> Iterator[None]:
    """Raise a `UserError` for sizes that do not fit in memory, and numbers beyond float32."""
    try:
        yield
    except (MemoryError, RuntimeError, TypeError) as error:  # a TypeError for a size above 2^63
        if _is_raised_by_the_user(error) and not isinstance(error, MemoryError):
            raise
        if "to type float without overflow" in str(error):
            raise UserError(
                f"a number is beyond float32, which ends at 3.4e38{_place(error)}; allowed: "
                "smaller ones, of hyperparameters such as learning_rate and weight_decay, too"
            ) from error
        if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        raise UserError(
            f"not enough memory: {one_line(error)}{_place(error)}; allowed: smaller sizes, of the "
            "batch (hyperparameters.global_batch_size), the model or the data"
        ) from error


@contextmanager
def limits_of_16_bits() -> Iterator[None]:
    """Raise a `UserError` for code that runs in float32 but not under autocast."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if (fault := fault_in_16_bits(error)) is None:
            raise
        raise UserError(fault) from error


def fault_in_16_bits(error: Exception) -> str | None:
    """What is wrong in code that runs in float32 but not under autocast, and what to write.

    None for an error that has nothing to do with 16 bits.
    """
    name = None if isinstance(error, UserError) else name_in_16_bits(str(error))
    if name is None or _is_raised_by_the_user(error):
        return None
    _, fault, remedy = _FAULTS_IN_16_BITS[name]
    return f"{fault}: {one_line(error)}{_place(error)}; allowed: {remedy}"


def name_in_16_bits(message: str) -> str | None:
    """`beyond_float16`, `no_16_bit_kernel`, `mixed_dtypes`, or None: what a message is about."""
    if _IN_16_BITS.search(message):
        for name, (words, _, _) in _FAULTS_IN_16_BITS.items():
            if words.search(message):
                return name
    return None


def _is_raised_by_the_user(error: BaseException) -> bool:
    """Whether a `raise` or an `assert` of the user's own code made an error."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith((sys.prefix, *_OURS)):
        return False
    return str(frames[-1].line).startswith(("raise ", "assert "))


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
    """Raise a `UserError` of one sentence for an error of a trial that a user can fix.

    Besides the limits above and exits, this is a `UserError` from a loader process, to whose text
    torch adds the whole traceback.
    """
    try:
        with limits_of_the_machine(), limits_of_16_bits(), translating_exits():
            yield
    except UserError as error:
        name = f"{type(error).__module__}.{type(error).__qualname__}: "
        _, of_a_worker, message = str(error).rpartition(f"\n{name}")
        if not of_a_worker:
            raise
        raise type(error)(message.strip()) from error


def exit_status(run: Callable[[], int]) -> int:
    """The result of `run`, or 2 after a `UserError`, which is printed."""
    try:
        return run()
    except UserError as error:
        _say(error)
        return 2


def _say(error: UserError) -> None:
    before = NO_RETRY if "DET_TASK_TYPE" in os.environ else AT_A_PROMPT
    print(f"{before}{printable(str(error))}", file=sys.stderr, flush=True)
    _report_to_launcher(f"{before}{error}")


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
    """Let a `UserError` that leaves this block end the program, unless it is caught.

    The program then prints one line and exits with status 2. Python passes an uncaught error to
    `sys.excepthook`, so that is replaced now, and not before there is such an error.
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

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            before(kind, error, trace)
            return
        _say(error)
        raise SystemExit(2)  # Python takes the exit status from the hook's exception

    sys.excepthook = hook
