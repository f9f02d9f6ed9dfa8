"""The kinds of trials of a search: the verbs of `determined_amp.search.on_cluster`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

ENTRYPOINT = "determined_amp.search.on_cluster"


class TrialKind(enum.Enum):
    """What a trial does. The value is the verb in the `entrypoint` of the search."""

    TRAIN = "train"
    """Trains; validations also report the share of gradients that the initial scale flushes."""
    COMPARE = "compare"
    """Only trains, so memory and speed are those of training alone."""
    SCORE = "score"
    """Measures its loss scale on a few frozen batches."""
    FIND = "find"
    """Finds the loss scale in one pass."""

    @staticmethod
    def of(search: Mapping[str, Any]) -> TrialKind | None:
        """The kind of the trials of a search; None if its entrypoint has no such verb."""
        entrypoint = search.get("entrypoint")
        words = entrypoint if isinstance(entrypoint, list) else str(entrypoint).split()
        after = words[words.index(ENTRYPOINT) + 1 :] if ENTRYPOINT in words else []
        return next((kind for kind in TrialKind if [kind.value] == after[:1]), None)
