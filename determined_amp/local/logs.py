"""Logs a local run: everything into its folder, and warnings onto the terminal."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

logger = logging.getLogger(__name__)

# The beginnings of Determined's warnings that alarm users, who can do nothing about
# them.
_NOT_FOR_USERS = ("TensorFlow writer not found", "Ignoring partial checkpoint download")


class Terminal(Console):
    """A terminal whose reader may go away. Then output ends, and the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class _LogFile(logging.FileHandler):
    """A log file that ends at an error, such as a full disk, while the run goes on."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        self.setLevel(logging.CRITICAL + 1)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(path: Path | None, console: Console) -> Iterator[None]:
    """Inside this block, log to `path` if given, and print warnings to `console`.

    Python's own warnings are logged, too, and the traceback of an error that ends the
    block. A few warnings of Determined are left out.
    """
    shown: logging.Handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, markup=False
    )
    written = _LogFile(path or os.devnull, encoding="utf-8")
    written.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handlers = (shown, written)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for handler in handlers:
        handler.addFilter(_is_for_users)
        root.addHandler(handler)
    try:
        yield
    except BaseException as error:
        shown.setLevel(logging.CRITICAL + 1)  # the caller prints the error
        logger.error("%s", type(error).__name__, exc_info=True)
        raise
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        logging.captureWarnings(False)
        root.setLevel(level)


def _is_for_users(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOT_FOR_USERS)
