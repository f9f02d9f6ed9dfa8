"""Logging of a local run: everything into its folder, warnings onto the terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

# How warnings of Determined begin that no user can act on.
_NOT_FOR_USERS = ("TensorFlow writer not found", "Ignoring partial checkpoint download")


class _MayVanish:
    """A standard stream whose reader may go away: then output ends, and the program
    goes on.

    Attributes:
        error: Why the output ended; None if it has not.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Send all further output nowhere, including what is still buffered at exit."""
        self.error = self.error or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        logger.info("stdout was closed; output continues in this log")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def surviving_closed_output() -> Iterator[_MayVanish]:
    """Inside this block a closed pipe or a full disk ends the output, not the
    program.
    """
    out: Any = _MayVanish(sys.stdout)
    errors: Any = _MayVanish(sys.stderr)
    with redirect_stdout(out), redirect_stderr(errors):
        try:
            yield out
        finally:
            out.flush()


class _LogFile(logging.FileHandler):
    """A log that ends where it cannot be written, as on a full disk, and the program
    goes on.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        self.setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path | None, console: Console) -> Iterator[None]:
    """Inside this block log to `path`, if given, and print warnings to `console`.

    Python's own warnings are logged, too, and the traceback of what ends the block. A
    few warnings of Determined are written and not shown.
    """
    from rich.logging import RichHandler  # noqa: PLC0415  # an image may lack it

    shown: logging.Handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, markup=False
    )
    shown.addFilter(lambda record: not record.getMessage().startswith(_NOT_FOR_USERS))
    handlers = [shown]
    if path is not None:
        written = _LogFile(path, encoding="utf-8")
        written.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        )
        handlers.append(written)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        shown.setLevel(logging.CRITICAL + 1)  # its catcher prints it to the terminal
        logger.error("%s", type(error).__name__, exc_info=True)
        raise
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)
        root.setLevel(level)
