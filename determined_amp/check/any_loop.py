"""Examines any training loop, and any script, without a change to its code.

`watching` wraps a loop, which may be a plain one, a Core API script or a trainer of
another library. `examine_script` runs a script for `check SCRIPT.py`. Both run a
`Recorder` and let `judge.py` judge its record. What a script writes goes to a folder of
`scratch.py`.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from determined_amp.amp.patched import patched
from determined_amp.check.finding import CheckFindings
from determined_amp.check.judge import judge_record
from determined_amp.check.record import is_doctors
from determined_amp.check.recorder import OVERFLOWS, STEPS, Recorder, eager
from determined_amp.check.scratch import changing_all_in, folder_of_launch
from determined_amp.check.two_scales import ScaleComparison, WaitingRuns

# The most steps that a script makes until it saves its first checkpoint.
MOST_STEPS = 5 * STEPS

# How often a script that goes on gets an `_Enough` before it gets a `SystemExit`.
_MOST_INTERRUPTS = 5

# A comparison of two scales may take this many seconds longer than the script's run.
_SECONDS_MORE = 10.0

TOO_SHORT = (
    f"the time was over before each optimizer had made {STEPS} steps: --minutes gives"
    " more"
)
WRITTEN = "what the script wrote went to a scratch folder, which is removed"
REFUSED = (
    "code in C++ and other processes can write to the scratch folder alone, and "
    "elsewhere get this error; --in-place lets them"
)
NOT_SAVED = (
    "torch.save was given the state of no optimizer in these steps, so no checkpoint "
    "was judged"
)
_NEEDS = (
    "that needs a script that runs alone, not in place, steps an optimizer of torch, "
    "and ends without an error"
)
NOT_ALONE = ScaleComparison(0, None, reason=_NEEDS)
NOT_A_SCRIPT = ScaleComparison(0, None, reason="that needs det-amp check SCRIPT.py")
ONE_RUN = (
    "one run cannot show whether a resume brings back the scale and the learning rates"
)


@contextmanager
def watching(overflows: Collection[int] = OVERFLOWS) -> Iterator[CheckFindings]:
    """Watch the training in this block; its findings are complete when the block ends.

        with determined_amp.check.watching() as findings:
            train()
        print(findings)

    A few dozen steps are enough. On a machine without a GPU, mixed precision that is
    written for CUDA runs on the CPU in this block. If the training raises an error, the
    findings are printed to standard error, and the error is raised with its own
    traceback.

    Args:
        overflows: The windows of each optimizer, counted from 0, whose gradients are
            made to overflow, so that the step is skipped. If it is empty, nothing
            disturbs the training, but what it does on a skipped step is seen only if a
            step is skipped anyway.
    """
    findings = CheckFindings()
    recorder = Recorder(overflows, looks_anyway=bool(overflows))
    recorder.record.at_two_scales = NOT_A_SCRIPT
    try:
        with watched(recorder, findings):
            yield findings
    except Exception as error:
        print(findings, file=sys.stderr)
        leave_out_doctor(error)
        raise


@contextmanager
def watched(recorder: Recorder, findings: CheckFindings) -> Iterator[None]:
    """Watch the training in this block, and fill the findings however it ends."""
    recorder.meet_optimizers()
    try:
        with _batches_of_loaders(recorder), recorder.watching():
            yield
    finally:
        vars(findings).update(vars(judge_record(recorder.record)))


def leave_out_doctor(error: BaseException) -> None:
    """Remove the frames of this package from a traceback, except the first frame."""
    trace = error.__traceback__
    while trace is not None:
        below = trace.tb_next
        if below is not None and is_doctors(below.tb_frame.f_code.co_filename):
            trace.tb_next = below.tb_next
        else:
            trace = below


def _kind_of_iterators() -> type:
    """The class that defines `__next__` for every iterator over a `DataLoader`."""
    generator = torch.Generator()  # leaves torch's global generator alone
    numbers: Any = [0]
    kinds = type(iter(DataLoader(numbers, generator=generator))).__mro__
    return next(kind for kind in kinds if "__next__" in vars(kind))


@contextmanager
def _batches_of_loaders(recorder: Recorder) -> Iterator[None]:
    """Note in this block when a `DataLoader` gives a training batch.

    A batch is a training batch if it is taken with gradients enabled.
    """
    kind: Any = _kind_of_iterators()
    own = kind.__next__

    def take(iterator: Any) -> Any:
        if not torch.is_grad_enabled():
            return own(iterator)
        recorder.end_batch()
        try:
            batch = own(iterator)
        except StopIteration:
            recorder.record.epochs += 1
            raise
        recorder.begin_batch(batch)
        return batch

    with patched(kind, "__next__", take):
        yield


# A script.


class _Enough(KeyboardInterrupt):
    """Ends a script as Ctrl-C does: the doctor has seen enough."""


class _ScriptEnd:
    """Ends a script when its optimizers have made enough steps, or its time is over.

    Args:
        recorder: The recorder of the script.

    Attributes:
        told: How often the script was told to end.
        is_late: Whether its time was over before it had made enough steps.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.told = 0
        self.is_late = False
        self._recorder = recorder

    def before_backward(self) -> None:
        """End the script before a backward, if the doctor has seen enough."""
        steps = self._steps()
        is_enough = steps >= MOST_STEPS or (steps >= STEPS and self.has_saved())
        if self.told or is_enough:
            self.told += 1
            raise SystemExit if self.told > _MOST_INTERRUPTS else _Enough

    def has_saved(self) -> bool:
        """Whether the script saved a checkpoint that can be judged."""
        return bool(self._recorder.record.of("save", optimizer=True))

    def _steps(self) -> int:
        return min(self._recorder.record.steps_of_each, default=0)

    @contextmanager
    def time_limit(self, seconds: float) -> Iterator[None]:
        """End what runs in this block after some seconds, even while it waits."""
        before = signal.signal(signal.SIGALRM, self._time_is_over)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _time_is_over(self, *signalled: object) -> None:
        self.is_late = not self.told and self._steps() < STEPS
        self.told += 1
        raise _Enough


def examine_script(
    path: str, arguments: Sequence[str], minutes: float, *, in_place: bool
) -> tuple[CheckFindings, BaseException | None]:
    """Run a script as `__main__`, and examine it.

    Args:
        path: The script.
        arguments: The script's own arguments.
        minutes: How long it may run.
        in_place: Whether to let it write to the files that it names.

    Returns:
        The findings, and the error that the script itself raised.
    """
    is_alone = not in_place and os.environ.get("WORLD_SIZE", "1") == "1"
    started = time.monotonic()
    with ExitStack() as stack:
        if is_alone:
            # Imports the compiler, which takes seconds, once for all forks. It and a
            # recorder ask for a GPU; else no fork could use one afterwards.
            asks_gently = mock.patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1")
            stack.enter_context(asks_gently)
            stack.enter_context(eager())
            again = WaitingRuns(partial(_run_in_scratch, path, arguments))
            stack.callback(again.close)
        recorder, findings = Recorder(), CheckFindings()
        end, record = _ScriptEnd(recorder), recorder.record
        recorder.before_backward = end.before_backward
        if not in_place:
            scratch = stack.enter_context(changing_all_in(folder_of_launch()))
        stack.enter_context(_as_started(path, arguments))
        with end.time_limit(60 * minutes):
            raised = _watch(path, recorder, findings, end)
        seconds = time.monotonic() - started + _SECONDS_MORE
        steps = len(record.of("step"))
        if record.scales_the_loss:
            can_compare = is_alone and raised is None and steps > 0
            record.at_two_scales = (
                again.compare(steps, seconds) if can_compare else NOT_ALONE
            )
            vars(findings).update(vars(judge_record(record)))
    if not in_place:
        is_refused = "Permission denied" in str(raised)
        findings.notes += [WRITTEN] * scratch.is_used + [REFUSED] * is_refused
    is_unsaved = findings.trained and findings.amp and not end.has_saved()
    findings.notes += [NOT_SAVED] * is_unsaved + [TOO_SHORT] * end.is_late + [ONE_RUN]
    return findings, raised


def _watch(
    path: str, recorder: Recorder, findings: CheckFindings, end: _ScriptEnd
) -> BaseException | None:
    """Run a script while it is watched; return the error that it raised."""
    try:
        with watched(recorder, findings):
            _run(path, end)
    except BaseException as error:
        leave_out_doctor(error)
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return error
    return None


def _run_in_scratch(path: str, arguments: Sequence[str]) -> None:
    """Run a script as `__main__`; what it writes is thrown away."""
    with changing_all_in(folder_of_launch()), _as_started(path, arguments):
        runpy.run_path(path, run_name="__main__")


def _run(path: str, end: _ScriptEnd) -> None:
    """Run a script; hide its exit if it succeeded, or if the doctor ended it."""
    try:
        runpy.run_path(path, run_name="__main__")
    except (SystemExit, KeyboardInterrupt) as left:
        is_right = isinstance(left, SystemExit) and left.code in (None, 0)
        if not (end.told or is_right):
            raise


@contextmanager
def _as_started(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Set `sys.argv` and `sys.path` as `python SCRIPT ARGUMENTS` does."""
    folder = str(Path(path).resolve().parent)
    with (
        patched(sys, "argv", [path, *arguments]),
        patched(sys, "path", [folder, *sys.path]),
    ):
        yield


def announced(file: str, minutes: float, *, in_place: bool) -> str:
    """Say in one line what will be done with a script."""
    changes = (
        "where it says"
        if in_place
        else "in a scratch folder alone, and loggers are off"
    )
    return (
        f"running {file} for {STEPS} to {MOST_STEPS} steps of each optimizer, for "
        f"{minutes:g} minutes at most, with two overflows, "
        "and then again in float32, at two loss scales or more. What it writes, "
        f"renames and removes changes {changes}"
    )


def is_first_rank() -> bool:
    """Whether this process is the rank of its launcher that prints."""
    return os.environ.get("RANK", "0") == "0"
