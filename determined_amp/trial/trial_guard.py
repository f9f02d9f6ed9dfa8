"""The guard of a trial: when Determined's loop asks it, and how a failed trial ends."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, NoReturn

import determined as det
from determined import pytorch

from determined_amp.amp.errors import GuardError
from determined_amp.amp.guard import Guard
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.settings import AmpSettings
from determined_amp.amp.tensors import is_not_finite
from determined_amp.experiment.machine import machine_of
from determined_amp.trial.determined_private import searcher, trial_seed
from determined_amp.trial.notes import note_on_master

logger = logging.getLogger(__name__)

# With these searchers a NaN makes the master stop the whole search, not only the trial
# (0.38.1 sends it as a string where it expects a number).
_STOPPED_BY_NAN = ("adaptive_asha", "async_halving")


class TrialGuard(pytorch.PyTorchCallback):
    """Asks the guard after every report and validation; `MixedPrecision.callbacks`
    makes it.

    Args:
        context: The trial's context. How a failed trial ends depends on its searcher.
        guard: The guard of its models and optimizers.
        settings: The `amp` section.
    """

    def __init__(
        self, context: pytorch.PyTorchTrialContext, guard: Guard, settings: AmpSettings
    ) -> None:
        method = searcher(context)
        self._method = str(method.get("name", "single"))
        self._metric = str(method.get("metric"))
        self._context = context
        self._guard = guard
        self._settings = settings

    def on_training_start(self) -> None:
        self._guard.start()
        settings, context = self._settings, self._context
        has_scale = settings.scales_the_loss and not settings.finds_scale
        now = datetime.now(timezone.utc)
        versions = {"python": platform.python_version()}
        machine = machine_of(context.device, context.distributed.size, versions)
        note_on_master(
            context,
            precision=settings.precision.value,
            # A scale that is still to be found is noted then.
            init_scale=settings.first_scale if has_scale else None,
            seed=trial_seed(context),
            failure=None,
            date=now.isoformat(timespec="seconds"),
            machine=asdict(machine),
        )

    def on_training_workload_end(
        self, avg_metrics: Metrics, batch_metrics: Any
    ) -> None:
        """Called on every rank with the same numbers, right after their report."""
        with self._ending_the_trial():
            self._guard.judge(avg_metrics)

    def on_validation_start(self) -> None:
        self._guard.repair()

    def on_validation_end(self, metrics: Metrics) -> None:
        """Called before the report, so a metric that is not finite never reaches a
        search.
        """
        value = metrics.get(self._metric)
        if not self._guard.enabled or not is_not_finite(value):
            return
        failure = f"{self._metric} is {value}"
        if self._method in _STOPPED_BY_NAN:
            self._end_search_trial(failure)
        with self._ending_the_trial():
            self._guard.fail(failure, metrics)

    def on_trial_shutdown(self) -> None:
        # else the run ends with an error, which says more
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
        logger.error("%s", message)  # InvalidHP ends the trial without a word
        note_on_master(self._context, failure=message)
        raise det.InvalidHP(message)
