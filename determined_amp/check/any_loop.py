"""Watches any loop that trains, and any script, without a changed line: a plain one, a
Core API script, a trainer of another library.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from determined_amp.amp.patched import patched
from determined_amp.check.finding import CheckFindings
from determined_amp.check.judge import judge_record
from determined_amp.check.record import is_doctors
from determined_amp.check.recorder import OVERFLOWS, Recorder
from determined_amp.check.scratch import changing_all_in, folder_of_launch

# Steps of each optimizer: two that overflow, and nine at each of two scales.
STEPS = 20
# Until so many it goes on to its first checkpoint.
MOST_STEPS = 5 * STEPS

# So often a script is told to end before the process is ended.
_PATIENCE = 5

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
ONE_RUN = (
    "one run cannot show whether a resume brings back the scale and the learning rates"
)


@contextmanager
def watching(
    overflows: Collection[int] = OVERFLOWS, *, moves_scale: bool = True
) -> Iterator[CheckFindings]:
    """Watch the training in this block; the findings are there when it ends.

        with determined_amp.check.watching() as findings:
            train()
        print(findings)

    A few dozen steps are enough. On a machine without a GPU, mixed precision that is
    written for CUDA runs on the CPU in this block. What the training raises is raised,
    with its own traceback, after the findings are printed.

    Args:
        overflows: Windows of each optimizer, from 0, whose gradients are made to
            overflow, so that the step is skipped. With an empty tuple, what it does on
            a skipped step is seen only if one is skipped anyway.
        moves_scale: Whether the loss scale is divided by 256 in some windows, and put
            back by `update`. That changes no right update beyond the rounding of
            float16. Without it, and without overflows, the training is left
            undisturbed.
    """
    findings = CheckFindings()
    recorder = Recorder(overflows, moves_scale=moves_scale)
    try:
        with watched(recorder, findings):
            yield findings
    except Exception as error:
        print(findings, file=sys.stderr)
        leave_out_doctor(error)
        raise


@contextmanager
def watched(recorder: Recorder, findings: CheckFindings) -> Iterator[None]:
    """Watch the training in this block, and fill the findings when it ends, however it
    does.
    """
    recorder.meet_optimizers()
    try:
        with _batches_of_loaders(recorder), recorder.watching():
            yield
    finally:
        vars(findings).update(vars(judge_record(recorder.record)))


def leave_out_doctor(error: BaseException) -> None:
    """Take the frames of this package out of a traceback, behind the first."""
    trace = error.__traceback__
    while trace is not None:
        below = trace.tb_next
        if below is not None and is_doctors(below.tb_frame.f_code.co_filename):
            trace.tb_next = below.tb_next
        else:
            trace = below


def _kind_of_iterators() -> type:
    """The class whose `__next__` every iterator over a `DataLoader` has."""
    generator = torch.Generator()  # so that the global one draws nothing
    numbers: Any = [0]
    kinds = type(iter(DataLoader(numbers, generator=generator))).__mro__
    return next(kind for kind in kinds if "__next__" in vars(kind))


@contextmanager
def _batches_of_loaders(recorder: Recorder) -> Iterator[None]:
    """A batch of a `DataLoader` that is taken with gradients enabled is a training
    batch.
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
    """The doctor has seen enough: the script ends as by Ctrl-C."""


class _End:
    """Ends a script: where its optimizers have made enough steps, or when its time is
    over.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.told = 0
        self.is_late = False  # its time was over first
        self._recorder = recorder

    def look(self) -> None:
        """Before each backward."""
        steps = self._steps()
        is_enough = steps >= MOST_STEPS or (steps >= STEPS and self.has_saved())
        if self.told or is_enough:
            self.told += 1
            raise SystemExit if self.told > _PATIENCE else _Enough

    def has_saved(self) -> bool:
        """Whether a checkpoint that can be judged was saved."""
        return bool(self._recorder.record.of("save", optimizer=True))

    def _steps(self) -> int:
        return min(self._recorder.record.steps_of_each, default=0)

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """End what runs in this block when so much time has passed, also while it
        waits.
        """
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
    """Run a script as `__main__` under the doctor's eyes.

    Args:
        path: The script.
        arguments: Its own.
        minutes: How long it may run.
        in_place: Whether what it saves goes where it says.

    Returns:
        The findings, and what the script itself raised.
    """
    recorder, findings = Recorder(moves_scale=True), CheckFindings()
    end = _End(recorder)
    recorder.before_backward = end.look
    raised: BaseException | None = None
    with ExitStack() as stack:
        if not in_place:
            scratch = stack.enter_context(changing_all_in(folder_of_launch()))
        stack.enter_context(_as_started(path, arguments))
        try:
            with watched(recorder, findings), end.after(60 * minutes):
                _run(path, end)
        except BaseException as error:
            raised = error
            leave_out_doctor(error)
            raised.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    if not in_place:
        is_refused = "Permission denied" in str(raised)
        findings.notes += [WRITTEN] * scratch.is_used + [REFUSED] * is_refused
    is_unsaved = findings.trained and findings.amp and not end.has_saved()
    findings.notes += [NOT_SAVED] * is_unsaved + [TOO_SHORT] * end.is_late + [ONE_RUN]
    return findings, raised


def _run(path: str, end: _End) -> None:
    try:
        runpy.run_path(path, run_name="__main__")
    except (SystemExit, KeyboardInterrupt) as left:
        is_right = isinstance(left, SystemExit) and left.code in (None, 0)
        if not (end.told or is_right):
            raise


@contextmanager
def _as_started(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Let `sys` be as `python SCRIPT ARGUMENTS` sets it."""
    folder = str(Path(path).resolve().parent)
    with (
        patched(sys, "argv", [path, *arguments]),
        patched(sys, "path", [folder, *sys.path]),
    ):
        yield


def announced(file: str, minutes: float, *, in_place: bool) -> str:
    """What will be done with a script, in a line."""
    changes = (
        "where it says"
        if in_place
        else "in a scratch folder alone, and loggers are off"
    )
    return (
        f"running {file} for {STEPS} to {MOST_STEPS} steps of each optimizer, for "
        f"{minutes:g} minutes at most, with two overflows and moves of the loss scale. "
        f"What it writes, renames and removes changes {changes}"
    )


def is_first_rank() -> bool:
    """Whether this process is the one of its launcher that prints."""
    return os.environ.get("RANK", "0") == "0"
