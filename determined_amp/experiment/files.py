"""Writes files so that each always has its whole old content or its whole new one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from determined_amp.amp.errors import nearest


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


def near_path(path: Path) -> str:
    """Ask whether the user meant another path, because this one does not exist.

    The other path has the same name one folder further down, or a near name in the same
    folder. The question is empty if there is no such path.
    """
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:
        return ""
    below = [*filter(os.path.exists, (each / path.name for each in beside))]
    if below:
        return f"; did you mean {below[-1]}?"
    alike = [each for each in beside if each.suffix == path.suffix and each != path]
    near = nearest(path.name, [each.name for each in alike])
    return f"; did you mean {path.with_name(near)}?" if near else ""
