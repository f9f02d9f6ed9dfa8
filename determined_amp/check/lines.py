"""Which line of the user's code does something."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from types import FrameType

from determined_amp.amp.users_code import is_users
from determined_amp.check.finding import Where

_DOCTOR = str(Path(__file__).parent) + os.sep
_LIBRARY = str(Path(__file__).parents[1]) + os.sep
_RUNS_SCRIPTS = runpy.run_path.__code__.co_filename
# Torch's own forms of autocast, which call the one that all are.
_AUTOCAST = tuple(
    os.path.join("torch", *parts, "amp", "autocast_mode.py")
    for parts in ((), ("cuda",), ("cpu",))
)
# What calls a trial: what it does by itself is not done by a line of the user's.
_LOOP = ("determined/pytorch/_pytorch_trial.py", "determined/pytorch/_trainer.py")


def is_doctors(file: str) -> bool:
    """Whether a file is one of this package, or runs a script for it: no user wants to
    see them.
    """
    return file.startswith(_DOCTOR) or file == _RUNS_SCRIPTS


def users_line() -> Where | None:
    """The line of the user's code that is being executed; None in code of others
    alone.
    """
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.endswith(_LOOP):
            return None
        if is_users(file):
            return where_in(file, line)
    return None


def caller() -> FrameType:
    """The frame that makes the call which a hook of this package sees."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next(frame for frame in frames if not _is_passed(frame.f_code.co_filename))


def _is_passed(file: str) -> bool:
    """Whether a file is the doctor's, or one of torch in which autocast is entered."""
    return is_doctors(file) or file.endswith(_AUTOCAST)


def called_by_library() -> bool:
    """Whether the rest of this library makes that call."""
    return caller().f_code.co_filename.startswith(_LIBRARY)


def where_in(path: str, line: int) -> Where:
    """A line of a file."""
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return Where(inside, line)


def where_raised(error: BaseException) -> Where | None:
    """The innermost line of the user's that an error has come through."""
    where = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_code.co_filename):
            where = where_in(frame.f_code.co_filename, line)
    return where
