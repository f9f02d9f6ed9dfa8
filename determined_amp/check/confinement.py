"""Refuses writes outside some folders, before they happen.

This catches what `scratch.py` cannot redirect, such as writes of C++ code and of child
processes. `scratch.changing_all_in` calls `confine`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

# Folders that stay writable, because they keep nothing: terminals, GPUs, shared memory.
_DEVICES = ("/dev", "/proc")

# The system calls of Landlock and their arguments, see the manual page landlock(7).
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
# The rights to write to files, and to remove, make and rename files of any kind; since
# version 3 also to truncate them. Version 1 refuses every rename to another folder.
_WRITE, _TRUNCATE = 0b11111111110010, 1 << 14

# Python's audit events that change what is at one path or at two.
_CHANGES = {"os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.truncate"}
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def confine(folders: Sequence[str]) -> None:
    """Refuse what this process would write outside some folders, until it ends.

    If the kernel has Landlock, it refuses the writes, also those of C++ code and of
    child processes. Otherwise an audit hook refuses those that Python reports.
    """
    allowed = [os.path.realpath(each) for each in (*folders, *_DEVICES)]
    if not _confined_by_landlock(allowed):
        sys.addaudithook(partial(_refuse, allowed))


def _confined_by_landlock(folders: Sequence[str]) -> bool:
    """Confine this thread and all that it starts; false without Landlock."""
    libc = ctypes.CDLL(None)
    if sys.platform != "linux":
        return False
    version = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version < 2:
        return False
    rights = _WRITE | (_TRUNCATE if version > 2 else 0)
    rules = libc.syscall(_CREATE_RULESET, struct.pack("=Q", rights), 8, 0)
    for folder in filter(os.path.isdir, folders):
        opened = os.open(folder, os.O_PATH)
        rule = struct.pack("=Qi", rights, opened)
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0)
        os.close(opened)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    status: int = libc.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)
    return status == 0


def _refuse(folders: Sequence[str], event: str, given: tuple[Any, ...]) -> None:
    """An audit hook that raises an error before something outside changes."""
    if event == "open":
        paths = given[:1] if given[2] & _TO_WRITE else ()
    else:
        paths = given[:2] if event in _CHANGES else ()
    for path in paths:
        if isinstance(path, int):  # an open file, or a mode
            continue
        place = os.path.realpath(os.fsdecode(path))
        if not any(f"{place}/".startswith(f"{each}/") for each in folders):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
