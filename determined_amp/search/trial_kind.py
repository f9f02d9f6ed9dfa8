"""What a trial of a search does: the verbs of `determined_amp.search.on_cluster`, as a table."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

ENTRYPOINT = "determined_amp.search.on_cluster"


class TrialKind(enum.Enum):
    """What a trial does; the value is its verb in the `entrypoint` of the search."""

    TRAIN = "train"
    """Trains, and every validation also reports what the initial scale flushes to zero."""
    COMPARE = "compare"
    """Trains and nothing more, so that memory and speed are those of the training."""
    SCORE = "score"
    """Measures its loss scale on a few frozen batches."""
    FIND = "find"
    """Finds the loss scale in one pass."""

    @staticmethod
    def of(search: Mapping[str, Any]) -> TrialKind | None:
        """The kind of the trials of a search; None if its entrypoint has no verb of ours."""
        entrypoint = search.get("entrypoint")
        words = entrypoint if isinstance(entrypoint, list) else str(entrypoint).split()
        after = words[words.index(ENTRYPOINT) + 1 :] if ENTRYPOINT in words else []
        return next((kind for kind in TrialKind if [kind.value] == after[:1]), None)
