"""What the process of a run records at its end; `Run.reported` judges it later.

A killed process records nothing, so the record of its run says `running`.
"""

from __future__ import annotations

import traceback

from determined_amp.amp.errors import UserError
from determined_amp.runs.run import RunState

# The state of a run, and why it has this state.
Ending = tuple[RunState, str]


class InvalidTrialError(UserError):
    """The hyperparameters of a trial cannot train. In a search this is a result, and
    no failure.
    """


class DiskError(UserError):
    """The disk is full or broken, so another trial would fail, too."""


def ending(error: BaseException | None, stopped: Ending | None = None) -> Ending:
    """How a run ended.

    Args:
        error: The error that ended it, if one did.
        stopped: Its ending if it was asked to stop.
    """
    if error is None or isinstance(error, KeyboardInterrupt):
        return stopped or (RunState.COMPLETED, "")
    if isinstance(error, InvalidTrialError):
        return RunState.INVALID, str(error)
    if isinstance(error, DiskError):
        return RunState.STOPPED, str(error)
    if isinstance(error, UserError):
        return RunState.FAILED, str(error)
    (text, *_) = traceback.format_exception_only(error)
    return RunState.FAILED, text.splitlines()[0]
