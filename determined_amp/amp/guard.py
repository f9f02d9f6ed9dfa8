"""Ends a run that no longer trains, and names the cause.

`GradScaler` skips steps silently, however many there are. The guard judges the numbers
of each report, and never waits for the device between two reports. All slots have the
same numbers, so all slots stop together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from determined_amp.amp.errors import GuardError
from determined_amp.amp.metrics import StepReport, TrainingMetrics
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.rehearse.diagnosis import find_cause
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.running_statistics import RunningStatistics
from determined_amp.amp.scaler import LossScaler
from determined_amp.amp.settings import (
    AmpSettings,
    OnOverflow,
)
from determined_amp.amp.slots import Slots
from determined_amp.amp.tensors import is_not_finite

logger = logging.getLogger(__name__)

# max_skip_ratio is judged over at least this many optimizer steps. Before this many
# have been applied since the start of the run, the loss scale still settles, and
# nothing is judged.
MIN_STEPS_TO_JUDGE = 10

# The end of a message if the newest batch shows no cause.
_FINITE = "The newest batch alone is finite"

_NO_BATCH = (
    "Its cause was not looked for: there is no batch to train again, or train_batch "
    "has changed the newest batch in place; in a loop give the newest batch and the "
    "loss function, amp.report(batch, loss_fn)"
)


class Guard:
    """Watches all models and optimizers of one training.

    Args:
        settings: The `amp` section, which says what counts as a failure.
        metrics: The metrics of the training. The guard judges the newest report.
        scaler: The scaler of the training.
        models: The models of the training. More may be appended until `start`.
        slots: The processes of the training. All of them judge at the same time.

    Attributes:
        enabled: A command that borrows the loop sets it to False before the training.
            Then nothing is judged, audited, found or warned about.
    """

    def __init__(
        self,
        settings: AmpSettings,
        metrics: TrainingMetrics,
        scaler: LossScaler,
        *,
        models: Sequence[nn.Module],
        slots: Slots,
    ) -> None:
        self.enabled = True
        self._settings = settings
        self._metrics = metrics
        self._scaler = scaler
        self._models = models
        self._slots = slots
        self._statistics = RunningStatistics(())
        # Applied and skipped steps of each optimizer when its ratio was last judged.
        self._judged_at: dict[str, tuple[int, int]] = {}
        self._norm_at_start: torch.Tensor | None = None
        # Counts since the share of left-out batches was last judged.
        self._left_out = self._batches = 0
        self._explained = False
        self._may_warn_of_no_step = True  # until it has said it

    def start(self) -> None:
        """Record the state at the start of the run; synchronises."""
        if not self.enabled:
            return
        self._statistics = RunningStatistics(self._models)
        self._norm_at_start = self._norm()

    def warn_of_no_applied_step(self) -> None:
        """Warn once if a run with a step or report applied no step; synchronises."""
        if not self.enabled or self._slots.rank:
            return
        skipped_in_all = 0
        for window in self._metrics.windows.all():
            counts = window.counts
            applied_before, skipped_before = counts.began
            if int(counts.applied) > applied_before:
                return
            skipped_in_all += counts.attempted - applied_before - skipped_before
        has_run = skipped_in_all or self._metrics.latest is not None
        if has_run and self._may_warn_of_no_step:
            self._may_warn_of_no_step = False
            logger.warning(
                "this run has trained nothing: %s. The weights are as they were at its "
                "start",
                (
                    f"all of its {skipped_in_all} optimizer steps overflowed and were "
                    "skipped"
                    if skipped_in_all
                    else "no optimizer was stepped"
                ),
            )

    def judge(self, metrics: Metrics, newest: Rehearsal | None) -> None:
        """Judge the newest report, right after it was made.

        Args:
            metrics: What was reported, the same on every slot.
            newest: The rehearsal of the newest batch; None if there is none.

        Raises:
            GuardError: if the run no longer trains, unless `on_overflow` is `warn`.
        """
        if not self.enabled:
            return
        self.repair()
        steps, loss = self._metrics.latest, self._metrics.loss
        if steps is None:
            return
        loss = metrics.get("loss") if loss is None else loss
        failures = [*self._failures(steps, loss)]
        if failures:
            self.fail(failures[0], metrics, newest)

    def repair(self) -> None:
        """Restore running statistics that are not finite, also before a validation."""
        self._statistics.repair()

    def fail(self, failure: str, metrics: Metrics, newest: Rehearsal | None) -> None:
        """End the run with the cause of a failure, or log it as a warning.

        Args:
            failure: A sentence without its full stop.
            metrics: The report or validation that shows the failure.
            newest: See `judge`.

        Raises:
            GuardError: unless `on_overflow` is `warn`.
        """
        # A rehearsal changes what the trial keeps itself, such as a queue. So only the
        # first warning looks for the cause.
        warns = self._settings.on_overflow is OnOverflow.WARN
        is_known = warns and self._explained
        self._explained = True
        cause = "Its cause is not looked for again" if is_known else self._cause(newest)
        message = f"{failure}. {cause}"
        if not warns:
            are_finite = not is_not_finite(self._norm(math.inf))
            is_good = self._settings.scales_the_loss and are_finite
            raise GuardError(message, state_is_good=is_good, metrics=metrics)
        logger.warning("%s", message)

    def _cause(self, rehearsal: Rehearsal | None) -> str:
        """Rehearse every slot's newest batch; return the first bad slot's cause."""
        # A loop may give its batch on some slots only, but all slots must take part.
        given = self._slots.allgather(rehearsal is not None)
        if rehearsal is None or not all(given):
            return _NO_BATCH
        cause = find_cause(
            rehearsal,
            self._slots,
            scale=self._scaler.get_scale(),
            grown=_growth(self._norm_at_start, self._norm()),
        )
        return f"Cause: {cause}" if cause else _FINITE

    def _failures(self, steps: Sequence[StepReport], loss: object) -> Iterator[str]:
        """The failures in the newest report, worst first."""
        settings = self._settings
        if not settings.scales_the_loss:
            # The loss of a batch that is left out has reached no weight.
            leaves_out = self._metrics.left_out > 0
            if is_not_finite(loss) and not leaves_out:
                yield f"the training loss is {loss} in {settings.precision.value}"
            elif (loss is None or leaves_out) and is_not_finite(self._norm(math.inf)):
                yield f"a parameter is not finite in {settings.precision.value}"
            yield from self._failure_of_batches()
            return
        yield from self._failure_of_batches()
        for step in steps:
            whose = f"optimizer {step.name[1:]}: " if step.name else ""
            for failure in self._failures_of(step):
                yield whose + failure

    def _failure_of_batches(self) -> Iterator[str]:
        """Judge the batches that a loop left out because their loss was not finite.

        They made no step, so no step report shows them.
        """
        self._left_out += self._metrics.left_out
        self._batches += self._metrics.batches
        left_out, batches = self._left_out, self._batches
        if batches < MIN_STEPS_TO_JUDGE:
            return
        self._left_out = self._batches = 0
        limit = self._settings.max_skip_ratio
        if left_out > limit * batches:
            yield (
                f"the loss of {left_out} of {batches} batches since the last look is "
                "not finite, and they made no step: more than max_skip_ratio "
                f"{limit:.0%}"
            )

    def _failures_of(self, step: StepReport) -> Iterator[str]:
        settings = self._settings
        skips = step.consecutive_skips
        if skips and self._metrics.scale_of_newest_step <= settings.min_scale:
            yield (
                f"the loss scale is at its floor {settings.min_scale:g} and steps still"
                " overflow"
            )
        if skips > settings.max_consecutive_skips:
            yield (
                f"{skips} optimizer steps in a row were skipped, more than "
                f"max_consecutive_skips {settings.max_consecutive_skips}"
            )
        skip_ratio = self._skip_ratio(step)
        if skip_ratio > settings.max_skip_ratio:
            yield (
                f"{skip_ratio:.0%} of the optimizer steps since the last look were "
                f"skipped, more than max_skip_ratio {settings.max_skip_ratio:.0%}"
            )

    def _skip_ratio(self, step: StepReport) -> float:
        """The share of skipped steps since the last judgement, over ten or more steps.

        It is 0 until ten steps of the run have been applied, because a scale that
        starts k bits too high skips k steps.
        """
        before = self._judged_at.get(step.name, step.began)
        applied, skipped = step.applied - before[0], step.skipped - before[1]
        is_settling = before[0] - step.began[0] < MIN_STEPS_TO_JUDGE
        if applied + skipped < MIN_STEPS_TO_JUDGE and not is_settling:
            return 0.0
        self._judged_at[step.name] = (step.applied, step.skipped)
        return 0.0 if is_settling else skipped / (applied + skipped)

    def _norm(self, order: float = 2.0) -> torch.Tensor | None:
        """A norm of all weights, (), float64, on one device; None if there are none."""
        known = (p for p in self._scaler.parameters() if not is_lazy(p))
        weights = [p.detach() for p in known if p.is_floating_point() and p.numel()]
        if not weights:
            return None
        norms = [
            norm.double().to(weights[0].device)
            for norm in torch._foreach_norm(weights, order)
        ]
        total: torch.Tensor = torch.stack(norms).norm(order)
        return total


def _growth(before: torch.Tensor | None, now: torch.Tensor | None) -> float:
    """The factor by which the weights have grown; 1 if unknown."""
    if before is None or now is None or not before > 0:
        return 1.0
    return float(now.to(before.device) / before)
