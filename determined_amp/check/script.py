"""Examines any script that trains, without a changed line."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from determined_amp.amp.patched import patched
from determined_amp.check.finding import Findings
from determined_amp.check.scale_moves import Moves
from determined_amp.check.scratch import saving_into
from determined_amp.check.spies import OVERFLOWS, Spies
from determined_amp.check.watch import leave_out_spies, watched

# Steps of each optimizer: two that overflow, and eight at each of two scales.
STEPS = 18

# So often a script is told to end before the process is ended.
_PATIENCE = 5

ONE_RUN = "one run cannot show whether a resume brings back the scale and the learning rates"


class Enough(KeyboardInterrupt):
    """The doctor has seen enough: the script ends as by Ctrl-C."""


class _End:
    """Ends a script: where its optimizers have made enough steps, or when its time is over."""

    def __init__(self, spies: Spies) -> None:
        self.told = 0
        self._spies = spies
        self._main = threading.get_ident()

    def look(self) -> None:
        """Before each backward."""
        steps = Counter(step.optimizer for step in self._spies.record.of("step"))
        if self.told or (steps and min(steps.values()) >= STEPS):
            self.tell()

    def tell(self) -> None:
        self.told += 1
        if self.told > _PATIENCE:
            raise SystemExit
        raise Enough

    def time_is_over(self) -> None:
        """On another thread; a call that waits, as for data, is interrupted, too."""
        self.told += 1
        signal.pthread_kill(self._main, signal.SIGINT)


def examine_script(
    path: str, arguments: Sequence[str], minutes: float, *, in_place: bool
) -> tuple[Findings, BaseException | None]:
    """Run a script as `__main__` under the doctor's eyes.

    Args:
        path: The script.
        arguments: Its own.
        minutes: How long it may run.
        in_place: Whether what it saves goes where it says.

    Returns:
        The findings, and what the script itself raised.
    """
    spies, findings = Spies(OVERFLOWS, Moves()), Findings()
    end = _End(spies)
    spies.before_backward = end.look
    timer = threading.Timer(60 * minutes, end.time_is_over)
    timer.daemon = True
    raised: BaseException | None = None
    with ExitStack() as stack:
        if not in_place:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="determined_amp-"))
            stack.enter_context(saving_into(Path(folder)))
        stack.enter_context(_as_started(path, arguments))
        stack.callback(timer.cancel)
        try:
            with watched(spies, findings):
                timer.start()
                _run(path, end)
        except BaseException as error:
            raised = error
            _leave_out_what_runs_it(error, path)
    findings.notes.append(ONE_RUN)
    return findings, raised


def _run(path: str, end: _End) -> None:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0) and not end.told:
            raise
    except KeyboardInterrupt:
        if not end.told:
            raise


@contextmanager
def _as_started(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Let `sys` be as `python SCRIPT ARGUMENTS` sets it."""
    folder = str(Path(path).resolve().parent)
    with patched(sys, "argv", [path, *arguments]), patched(sys, "path", [folder, *sys.path]):
        yield


def _leave_out_what_runs_it(error: BaseException, path: str) -> None:
    """Let a traceback begin in the script."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != path:
        trace = trace.tb_next
    error.__traceback__ = trace or error.__traceback__
    leave_out_spies(error)


def show(raised: BaseException | None) -> None:
    """Print what a script raised, as Python does."""
    if raised is not None:
        traceback.print_exception(raised)


def is_first_rank() -> bool:
    """Whether this process is the one of its launcher that prints."""
    return os.environ.get("RANK", "0") == "0"
