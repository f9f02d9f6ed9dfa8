"""Where the log of a local run goes: everything into its folder, warnings onto the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler


@contextmanager
def logging_to(path: Path | None, console: Console) -> Iterator[None]:
    """Log to `path` meanwhile, if one is given, and warnings, Python's included, to `console`."""
    shown: logging.Handler = RichHandler(
        logging.WARNING, console, show_time=False, show_path=False, markup=False
    )
    handlers = [shown]
    if path is not None:
        written = logging.FileHandler(path)
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
