"""Writes a file so that it always has its whole old content or its whole new one."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one step. A kill leaves the old content or the new one. A link
    is replaced, not followed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError as error:
        # An error on an open file names no file.
        error.filename = error.filename or str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
