"""Writes files so that what is there is whole: the old content or the new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file in one step: a killed process leaves the old content or the new one."""
    lines = [text] if isinstance(text, str) else text
    write_together({path: (line.encode() for line in lines)})


def write_together(contents: Mapping[Path, Iterable[bytes]]) -> None:
    """Replace files, or none if one of them cannot be written. A link is replaced, not followed."""
    partials = {path: path.with_name(f".{path.name}.partial") for path in contents}
    try:
        for path, content in contents.items():
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            if path.exists() and not path.is_file():  # a device or a pipe
                partials[path] = path
            _write(partials[path], content)
        for path, partial in partials.items():
            if partial != path:
                os.replace(partial, path)
    finally:
        for path, partial in partials.items():
            if partial != path:
                partial.unlink(missing_ok=True)


def _write(path: Path, content: Iterable[bytes]) -> None:
    try:
        with path.open("wb") as file:
            file.writelines(content)
    except OSError as error:
        error.filename = error.filename or str(path)  # that of a file that is open names none
        raise
