"""Logging of a local run: everything into its folder, warnings onto the terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.logging import RichHandler

logger = logging.getLogger(__name__)

# Warnings of Determined about its own storage and its own writer: nothing that a user can change.
_NOT_FOR_USERS = ("Ignoring partial checkpoint download", "TensorFlow writer not found")


class _MayVanish:
    """A standard stream whose reader may go away: then output ends, and the program goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        """Send all further output nowhere, including what is still buffered at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        logger.info("stdout was closed; output continues in this log")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def surviving_closed_output() -> Iterator[None]:
    """Inside this block a closed pipe or terminal ends the output, not the program."""
    before = sys.stdout, sys.stderr
    out: Any = _MayVanish(sys.stdout)
    errors: Any = _MayVanish(sys.stderr)
    sys.stdout, sys.stderr = out, errors
    try:
        yield
    finally:
        out.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def logging_to(path: Path | None, console: Console) -> Iterator[None]:
    """Inside this block log to `path`, if given, and print warnings to `console`.

    Python's own warnings are logged, too. A few of Determined's are written and not shown.
    """
    shown: logging.Handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, markup=False
    )
    shown.addFilter(_is_for_users)
    handlers = [shown]
    if path is not None:
        written = logging.FileHandler(path, encoding="utf-8")
        written.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        handlers.append(written)
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)
        root.setLevel(level)


def _is_for_users(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOT_FOR_USERS)
