"""Commands of `python -m determined_amp` that combine several packages."""

from collections.abc import Sequence

Arguments = Sequence[str]  # what stands behind a command
