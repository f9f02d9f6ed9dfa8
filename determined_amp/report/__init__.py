"""Reads runs from folders or a master, draws them and judges them."""

from collections.abc import Iterator, Sequence

from determined_amp.runs.run import Run

Runs = Sequence[Run]
Sentences = Iterator[str]
