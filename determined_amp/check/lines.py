"""Which line of the user's code does something."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from determined_amp.check.finding import Where

_LIBRARY = str(Path(__file__).parents[1]) + os.sep
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THE_USERS = (_LIBRARY, "<", *(path + os.sep for path in _PATHS if path))
# Also of packages for one user alone, as in a task of a cluster.
_INSTALLED = tuple(f"{os.sep}{name}-packages{os.sep}" for name in ("site", "dist"))
# What calls a trial: what it does by itself is not done by a line of the user's.
_LOOP = ("determined/pytorch/_pytorch_trial.py", "determined/pytorch/_trainer.py")


def is_users(file: str) -> bool:
    """Whether a file is neither this library's nor an installed package's."""
    return not (file.startswith(_NOT_THE_USERS) or any(part in file for part in _INSTALLED))


def users_line() -> Where | None:
    """The line of the user's code that is being executed; None in code of others alone."""
    for frame in _frames():
        if frame.f_code.co_filename.endswith(_LOOP):
            return None
        if is_users(frame.f_code.co_filename):
            return where_of(frame)
    return None


def passes(end: str) -> bool:
    """Whether a file of this library with such an end called what is being executed."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if is_users(file):
            return False
        if file.startswith(_LIBRARY) and file.endswith(end):
            return True
    return False


def _frames() -> Iterator[FrameType]:
    """The frames that lead to the caller, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def where_of(frame: FrameType) -> Where:
    """The line at which a frame is."""
    return where_in(frame.f_code.co_filename, frame.f_lineno)


def where_in(path: str, line: int) -> Where:
    """A line of a file."""
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    return Where(inside, line)


def where_raised(error: BaseException) -> Where | None:
    """The innermost line of the user's that an error has come through."""
    trace, where = error.__traceback__, None
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            where = where_in(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return where
