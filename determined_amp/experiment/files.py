"""Writes files so that each is whole at any time: its old content or its new one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from determined_amp.amp.errors import UserError, nearest


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file in one step: a killed process leaves the old content or the new
    one.
    """
    lines = [text] if isinstance(text, str) else text
    write_together({path: (line.encode() for line in lines)})


def write_together(contents: Mapping[Path, Iterable[bytes]]) -> None:
    """Replace files, or none if one of them cannot be written. A link is replaced, not
    followed.
    """
    partials = {path: path.with_name(f".{path.name}.partial") for path in contents}
    try:
        for path, content in contents.items():
            # a device or a pipe; a folder is refused
            if path.exists() and not path.is_file():
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
        # an error on an open file names no file
        error.filename = error.filename or str(path)
        raise


def near_path(path: Path) -> str:
    """A question that names what may be meant by a path that is not there.

    It is one of this name, one folder further down, or one beside it with a near name;
    empty without either.
    """
    try:
        beside = sorted(path.parent.iterdir())
    except OSError:
        return ""
    below = [each / path.name for each in beside if os.path.exists(each / path.name)]
    if below:
        return f"; did you mean {below[-1]}?"
    alike = [each for each in beside if each.suffix == path.suffix and each != path]
    near = nearest(path.name, [each.name for each in alike])
    return f"; did you mean {path.with_name(near)}?" if near else ""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is deleted after this block.

    Raises:
        UserError: if there is no place for one.
    """
    try:
        folder = tempfile.TemporaryDirectory()
    except OSError as error:
        raise UserError(
            f"no temporary folder can be made: {error}; allowed: TMPDIR with the path "
            "of a folder that can be written"
        ) from error
    with folder as path:
        yield Path(path)


@contextmanager
def directory_kept() -> Iterator[None]:
    """Return to the working directory after this block, because a trial may leave
    it.
    """
    here = os.getcwd()
    try:
        yield
    finally:
        os.chdir(here)
