"""Tells the master the settings of a run, its state, and why it failed."""

from __future__ import annotations

import logging
import os
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, NoReturn

import determined as det
from determined import core, pytorch

from determined_amp.amp.errors import GuardError, UserError
from determined_amp.amp.guard import Guard
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.settings import AmpSettings
from determined_amp.amp.tensors import is_not_finite
from determined_amp.experiment.machine import machine_of
from determined_amp.trial.determined_private import (
    REFUSED,
    searcher,
    train_context,
    train_context_of_task,
    trial_seed,
)

logger = logging.getLogger(__name__)

# How many characters of a status the page of a run shows well. Its card shows twenty.
_STATUS_WIDTH = 100

# How many characters a text in the metadata of a run may have. A master refuses more.
_LONGEST_TEXT = 5000

# What may stand before the cause in a reason: the symptom, or the place of a key.
_BEFORE_THE_CAUSE = re.compile(
    r"^(.*?\. Cause: )?(experiment: )?(the |forward |gradient |hyperparameters\.)?",
    re.DOTALL,
)


def note_on_master(context: pytorch.PyTorchTrialContext, **values: Any) -> None:
    """Note values in the metadata of the run. The WebUI can show them as columns.

    It does nothing except on the chief of a cluster. None removes a value.
    """
    if context.distributed.rank == 0:
        note(train_context(context), **values)


def note(train: core.TrainContext, **values: Any) -> None:
    """Note values in the metadata of a run, long texts in parts."""
    if isinstance(train, core.DummyTrainContext):
        return
    try:
        known = train.get_metadata() or {}
        fitting = {
            name: in_parts(value) if isinstance(value, str) else value
            for name, value in values.items()
        }
        amp = {**known.get("amp", {}), **fitting}
        kept = {name: value for name, value in amp.items() if value is not None}
        train.set_metadata({**known, "amp": kept})
    except REFUSED as error:
        logger.warning("the master did not take the metadata of this run: %s", error)


def in_parts(text: str) -> str | list[str]:
    """A text for the metadata: a list of parts if it is too long for one value.

    `"".join` makes the text again, from a text or a list.
    """
    starts = range(0, len(text), _LONGEST_TEXT)
    parts = [text[at : at + _LONGEST_TEXT] for at in starts]
    return text if len(parts) == 1 else parts


def show_failure(train: core.TrainContext, reason: str) -> None:
    """Note in the metadata why a run ended, and show the cause as its status.

    Call it after the loop, because the loop ends with the status "checkpointing".
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
    """Note a `UserError` that ends a task before it has a context."""
    try:
        yield
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            with suppress(Exception):  # it must not hide the error that is printed
                show_failure(train_context_of_task(info), str(error))
        raise


# With these searchers a NaN makes the master stop the whole search, not only the trial:
# 0.38.1 sends it as a string where it expects a number.
_STOPPED_BY_NAN = ("adaptive_asha", "async_halving")


class TrialGuard(pytorch.PyTorchCallback):
    """Asks the guard after every report and validation.

    Args:
        context: The trial's context. Its searcher decides how a failed trial ends.
        guard: The guard of the training.
        settings: The `amp` section.
        newest: Makes the rehearsal of the newest batch; None if there is none.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        guard: Guard,
        settings: AmpSettings,
        *,
        newest: Callable[[], Rehearsal | None],
    ) -> None:
        method = searcher(context)
        self._method = str(method.get("name", "single"))
        self._metric = str(method.get("metric"))
        self._context = context
        self._guard = guard
        self._settings = settings
        self._newest = newest

    def on_training_start(self) -> None:
        self._guard.start()
        settings, context = self._settings, self._context
        now = datetime.now(timezone.utc)
        versions = {"python": platform.python_version()}
        machine = machine_of(context.device, context.distributed.size, versions)
        scale = settings.first_scale if settings.scales_the_loss else None
        note_on_master(
            context,
            precision=settings.precision.value,
            # A scale that must be found is noted later, and a resume keeps that note.
            **({} if settings.finds_scale else {"init_scale": scale}),
            seed=trial_seed(context),
            failure=None,
            date=now.isoformat(timespec="seconds"),
            machine=asdict(machine),
        )

    def on_training_workload_end(
        self, avg_metrics: Metrics, batch_metrics: Any
    ) -> None:
        """Called on every rank with the same numbers, right after a report."""
        with self._ending_the_trial():
            self._guard.judge(avg_metrics, self._newest())

    def on_validation_start(self) -> None:
        self._guard.repair()

    def on_validation_end(self, metrics: Metrics) -> None:
        """Called before the report, so no search sees a metric that is not finite."""
        value = metrics.get(self._metric)
        if not self._guard.enabled or not is_not_finite(value):
            return
        failure = f"{self._metric} is {value}"
        if self._method in _STOPPED_BY_NAN:
            self._end_search_trial(failure)
        with self._ending_the_trial():
            self._guard.fail(failure, metrics, self._newest())

    def on_trial_shutdown(self) -> None:
        # otherwise the run ends with an error, which says more
        if sys.exc_info()[1] is None:
            self._guard.warn_of_no_applied_step()

    @contextmanager
    def _ending_the_trial(self) -> Iterator[None]:
        try:
            yield
        except GuardError as error:
            if self._method != "single":
                self._end_search_trial(str(error))
            note_on_master(self._context, failure=str(error))
            raise

    def _end_search_trial(self, message: str) -> NoReturn:
        logger.error("%s", message)  # InvalidHP ends the trial without a message
        note_on_master(self._context, failure=message)
        raise det.InvalidHP(message)
