"""Writes files so that each always has its whole old content or its whole new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step. A kill leaves the old content or the new one."""
    write_together({path: text.encode()})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Replace files, or none if one of them cannot be written. A link is replaced, not
    followed.
    """
    partials = {path: path.with_name(f".{path.name}.partial") for path in contents}
    try:
        for path, content in contents.items():
            # Writing to a folder fails here, before any file is replaced.
            _write(path if path.is_dir() else partials[path], content)
        for path, partial in partials.items():
            os.replace(partial, path)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        # An error on an open file names no file.
        error.filename = error.filename or str(path)
        raise
