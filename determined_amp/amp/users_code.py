"""Tells which code is the user's own; depends on Python only."""

from __future__ import annotations

import os
from pathlib import Path

_LIBRARY = str(Path(__file__).parents[1]) + os.sep
_OF_PYTHON = str(Path(os.__file__).parent) + os.sep
# Folders of packages, installed for all users or, as in a cluster's task, for one.
_INSTALLED = ("/site-packages/", "/dist-packages/")


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package.

    A file below Python's prefix need not: the prefix of a system's Python is `/usr`.
    """
    return file.startswith(_OF_PYTHON) or any(part in file for part in _INSTALLED)


def is_users(file: str) -> bool:
    """Whether a file is neither this library's nor an installed package's."""
    return not (file.startswith((_LIBRARY, "<")) or is_installed(file))
