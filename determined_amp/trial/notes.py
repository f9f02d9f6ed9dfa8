"""What a run tells its master: values in the run's metadata, and why it failed."""

from __future__ import annotations

import logging
import textwrap
from contextlib import suppress
from typing import Any

from determined import core, pytorch
from determined.common.api import bindings, errors

from determined_amp.trial.determined_0_38 import train_context

logger = logging.getLogger(__name__)

# What a request to the master may raise.
_REFUSED = (errors.BadRequestException, bindings.APIHttpError, OSError)

# Characters of a status that the overview of a run shows well.
_STATUS_WIDTH = 100


def note_on_master(context: pytorch.PyTorchTrialContext, **values: Any) -> None:
    """Note values in the metadata of the run, which the lists of the WebUI can show as columns.

    Only the chief does, and only on a cluster. None removes a value.
    """
    train = train_context(context)
    if context.distributed.rank or isinstance(train, core.DummyTrainContext):
        return
    try:
        known = train.get_metadata() or {}
        amp = {**known.get("amp", {}), **values}
        kept = {name: value for name, value in amp.items() if value is not None}
        train.set_metadata({**known, "amp": kept})
    except _REFUSED as error:
        logger.warning("the master did not take the metadata of this run: %s", error)


def show_failure(context: pytorch.PyTorchTrialContext, reason: str) -> None:
    """Note why a trial ended, and let the overview of the run in the WebUI begin with it.

    Called when its loop is over, which shows the state "checkpointing" at its end.
    """
    note_on_master(context, failure=reason)
    if context.distributed.rank == 0:
        with suppress(*_REFUSED):  # which has been said by then
            train_context(context).set_status(textwrap.shorten(reason, _STATUS_WIDTH))
