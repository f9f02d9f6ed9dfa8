"""Reads runs from folders or a master, draws them and judges them."""

from collections.abc import Iterator, Sequence

from determined_amp.amp.errors import UserError
from determined_amp.runs.run import Run

Runs = Sequence[Run]
Sentences = Iterator[str]


class ReportError(UserError):
    """A report cannot be made. The message says why, and what to do."""
