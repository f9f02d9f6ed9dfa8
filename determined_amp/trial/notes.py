"""Tells the master about a run: values in its metadata, and why it failed."""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import determined as det
from determined import core, pytorch

from determined_amp.amp.errors import UserError
from determined_amp.trial.determined_private import (
    REFUSED,
    train_context,
    train_context_of_task,
)

logger = logging.getLogger(__name__)

# Characters of a status that the page of a run shows well; its card shows the first
# twenty.
_STATUS_WIDTH = 100

# What a reason may begin with before it names its cause: the symptom, or the place of a
# key.
_BEFORE_THE_CAUSE = re.compile(
    r"^(.*?\. Cause: )?(experiment: )?(the |forward |gradient |hyperparameters\.)?",
    re.DOTALL,
)


def note_on_master(context: pytorch.PyTorchTrialContext, **values: Any) -> None:
    """Note values in the metadata of the run, which lists of the WebUI can show as
    columns.

    It does nothing except on the chief of a cluster. None removes a value.
    """
    if context.distributed.rank == 0:
        note(train_context(context), **values)


def note(train: core.TrainContext, **values: Any) -> None:
    """Note values in the metadata of a run, as `note_on_master` does."""
    if isinstance(train, core.DummyTrainContext):
        return
    try:
        known = train.get_metadata() or {}
        amp = {**known.get("amp", {}), **values}
        kept = {name: value for name, value in amp.items() if value is not None}
        train.set_metadata({**known, "amp": kept})
    except REFUSED as error:
        logger.warning("the master did not take the metadata of this run: %s", error)


def show_failure(train: core.TrainContext, reason: str) -> None:
    """Note why a run ended in its metadata, and show the cause as its status.

    Call it after the loop, which ends with the status "checkpointing".
    """
    note(train, failure=reason)
    show_status(train, cause_first(reason))


def show_status(train: core.TrainContext, status: str) -> None:
    """Show a status on the page of a run, shortened to what fits."""
    with suppress(*REFUSED):
        train.set_status(textwrap.shorten(status, _STATUS_WIDTH))


def cause_first(reason: str) -> str:
    """A reason without the words before its cause."""
    return _BEFORE_THE_CAUSE.sub("", reason) or reason


@contextmanager
def failure_noted(info: det.ClusterInfo) -> Iterator[None]:
    """Note a `UserError` that ends a task before it has a context; other errors
    pass.
    """
    try:
        yield
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            with suppress(Exception):  # it must not hide the reason, which is printed
                show_failure(train_context_of_task(info), str(error))
        raise
