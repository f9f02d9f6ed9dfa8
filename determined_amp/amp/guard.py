"""Ends a run that no longer trains, after a checkpoint of its last good state and with the cause.

`GradScaler` skips steps silently, however many there are. The guard looks at numbers that the
report has read anyway, so it costs no synchronisation of its own. They are the same on every rank,
so all ranks stop together.
"""

from __future__ import annotations

import logging
import math
import platform
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NoReturn

import determined as det
import torch
from determined import core, pytorch
from determined.common.api import bindings, errors
from torch import nn
from torch.nn.parameter import is_lazy

from determined_amp.amp.diagnosis import Train, find_cause
from determined_amp.amp.metrics import MetricName, Report, StepReport
from determined_amp.amp.precision import described_device
from determined_amp.experiment.amp_settings import OnOverflow
from determined_amp.experiment.errors import GuardError

if TYPE_CHECKING:
    from determined_amp.amp.mixed_precision import MixedPrecision

logger = logging.getLogger(__name__)

# With these searchers a NaN makes the master stop the whole search, not only the trial (0.38.1
# sends it as a string where it expects a number).
_STOPPED_BY_NAN = ("adaptive_asha", "async_halving")

# Optimizer steps that max_skip_ratio is judged over, at least; and applied steps from the beginning
# of a run until it is judged at all, since the loss scale finds its level there.
MIN_STEPS_TO_JUDGE = 10

# So many skips at the start are worth a line in the log.
_WORTH_A_LINE = 5

# What a request to the master may raise.
_REFUSED = (errors.BadRequestException, bindings.APIHttpError, OSError)

# Characters of a status that the overview of a run shows well.
_STATUS_WIDTH = 100

# The newest batch, and how to train it at a loss scale without a step; None before the first batch.
Replay = Callable[[], "tuple[Any, Train] | None"]


class Guard(pytorch.PyTorchCallback):
    """Watches all models and optimizers of one trial; `MixedPrecision.callbacks` makes it.

    Args:
        context: The trial's context. Its searcher decides how a failed trial ends.
        amp: The trial's mixed precision; its settings say what counts as failure.
        replay: Gives the newest batch, and how to train it again.
    """

    def __init__(
        self, context: pytorch.PyTorchTrialContext, amp: MixedPrecision, replay: Replay
    ) -> None:
        searcher = (context._exp_conf or {}).get("searcher") or {}
        self._method = str(searcher.get("name", "single"))
        self._metric = str(searcher.get("metric"))
        self._context = context
        self._amp = amp
        self._replay = replay
        self._statistics = RunningStatistics(context.models)
        # Applied and skipped steps of each optimizer when the run began, and when their ratio was
        # judged last.
        self._began_at: dict[str, tuple[int, int]] = {}
        self._judged_at: dict[str, tuple[int, int]] = {}
        self._norm_at_start: torch.Tensor | None = None
        self._scale_at_start = 1.0
        self._explained = False
        self._said_drift = False
        self._said: set[str] = set()
        self._said_no_step = False

    def on_training_start(self) -> None:
        self._statistics.remember()
        settings = self._amp.settings
        note_on_master(
            self._context,
            precision=settings.precision.value,
            init_scale=settings.init_scale if settings.scales_the_loss else None,
            seed=self._context._trial_seed,  # None in a Trainer outside of a cluster
            failure=None,
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine={
                **described_device(self._amp.device),
                "slots": self._context.distributed.size,
                "versions": {"python": platform.python_version()},
            },
        )
        several = len(self._context.optimizers) > 1
        for index, gradients in enumerate(self._amp.metrics.all()):
            counts = gradients.counts
            applied = int(counts.applied)
            name = f"_{index}" if several else ""
            self._began_at[name] = applied, counts.attempted - applied
        self._judged_at = dict(self._began_at)
        self._norm_at_start = _norm(self._context.models)
        self._scale_at_start = self._amp.scaler.get_scale()

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: Any) -> None:
        """Called on every rank with the same numbers, right after they were reported."""
        if not self._amp.watched:
            return
        self._statistics.repair()
        report = self._amp.metrics.latest
        if report is None:
            return
        self._say_drift(avg_metrics)
        self._say_skips_at_the_start(report)
        self._say_no_step(report, len(batch_metrics or ()))
        for found in self._failures(report, avg_metrics):
            self._fail(found)
            return

    def on_validation_start(self) -> None:
        self._statistics.repair()

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called before the metrics are reported: one that is not finite never reaches a search."""
        value = metrics.get(self._metric)
        if not self._amp.watched or not _is_not_finite(value):
            return
        found = f"{self._metric} is {value}"
        if self._method in _STOPPED_BY_NAN:
            self._end_trial(found)
        self._fail(found)

    def _fail(self, found: str) -> None:
        # What a trial keeps itself, such as a queue, moves with every replay: one for a warning.
        is_known = self._amp.settings.on_overflow is OnOverflow.WARN and self._explained
        self._explained = True
        self._act(f"{found}. {'Its cause is not looked for again' if is_known else self._cause()}")

    def _cause(self) -> str:
        """Train the newest batch of every rank again, and say what the first of them found."""
        replay, cause = self._replay(), None
        try:
            if replay is not None:  # the same on every rank
                models = self._context.models
                cause = find_cause(
                    models,
                    *replay,
                    scale=self._amp.scaler.get_scale(),
                    optimizers=self._context.optimizers,
                    grown=_growth(self._norm_at_start, _norm(models)),
                    slots=self._context.distributed,
                )
        except Exception as error:  # other ranks wait for this one, and the failure must be said
            cause = f"not found: training the batch again raised {type(error).__name__}: {error}"
        causes = self._context.distributed.allgather(cause)
        return next(
            (f"Cause: {cause}" for cause in causes if cause), "The newest batch alone is finite"
        )

    def _act(self, message: str) -> None:
        if self._amp.settings.on_overflow is OnOverflow.WARN:
            logger.warning("%s", message)
            return
        if self._method != "single":
            self._end_trial(message)
        note_on_master(self._context, failure=message)
        raise GuardError(message, state_is_good=self._amp.settings.scales_the_loss)

    def _end_trial(self, message: str) -> NoReturn:
        logger.error("%s", message)  # InvalidHP ends the trial without a word
        note_on_master(self._context, failure=message)
        raise det.InvalidHP(message)

    def _failures(self, report: Report, metrics: dict[str, Any]) -> Iterator[str]:
        """What is wrong with a report, worst first."""
        settings = self._amp.settings
        if not settings.scales_the_loss:
            loss = metrics.get("loss") if report.loss is None else report.loss
            if _is_not_finite(loss):
                yield f"the training loss is {loss} in {settings.precision.value}"
            elif loss is None and not self._weights_are_finite():
                yield f"a parameter is not finite in {settings.precision.value}"
            return
        for step in report.steps:
            whose = f"optimizer {step.name[1:]}: " if step.name else ""
            for failure in self._failures_of(step, report.scale_of_newest_step):
                yield whose + failure

    def _weights_are_finite(self) -> bool:
        """Of a trial that reports no loss; synchronises once."""
        models = self._context.models
        parameters = [p for m in models for p in m.parameters() if p.is_floating_point()]
        sums = [p.detach().sum().to(self._amp.device) for p in parameters]
        return not sums or bool(torch.isfinite(torch.stack([s.double() for s in sums])).all())

    def _failures_of(self, step: StepReport, used_scale: float) -> Iterator[str]:
        settings = self._amp.settings
        skips = step.consecutive_skips
        if skips and used_scale <= settings.min_scale:
            yield f"the loss scale is at its floor {settings.min_scale:g} and steps still overflow"
        if skips > settings.max_consecutive_skips:
            yield (
                f"{skips} optimizer steps in a row were skipped, more than "
                f"max_consecutive_skips {settings.max_consecutive_skips}"
            )
        skip_ratio = self._skip_ratio(step)
        if skip_ratio > settings.max_skip_ratio:
            yield (
                f"{skip_ratio:.0%} of the optimizer steps since the last look were skipped, "
                f"more than max_skip_ratio {settings.max_skip_ratio:.0%}"
            )

    def _skip_ratio(self, step: StepReport) -> float:
        """Judged over whole reports, until there are ten steps: one skipped step is not a trend.

        The reports with the first ten applied steps are not judged: k bits too high are k skips.
        """
        before = self._judged_at.get(step.name, (0, 0))
        began_at, _ = self._began_at.get(step.name, (0, 0))
        applied, skipped = step.applied - before[0], step.skipped - before[1]
        is_settling = before[0] - began_at < MIN_STEPS_TO_JUDGE
        if applied + skipped < MIN_STEPS_TO_JUDGE and not is_settling:
            return 0.0
        self._judged_at[step.name] = (step.applied, step.skipped)
        return 0.0 if is_settling else skipped / (applied + skipped)

    def _say_skips_at_the_start(self, report: Report) -> None:
        """Once per optimizer, in the first report that has an applied step."""
        for step in report.steps:
            applied, skipped = self._began_at.get(step.name, (0, 0))
            if step.applied == applied or step.name in self._said or step.consecutive_skips:
                continue
            self._said.add(step.name)
            skips = step.skipped - skipped
            if skips >= _WORTH_A_LINE and self._context.distributed.rank == 0:
                logger.warning(
                    "%d steps were skipped at the start, while the loss scale fell from %g to %g: "
                    "with that as amp.init_scale none would have been",
                    skips,
                    self._scale_at_start,
                    report.scale_of_newest_step,
                )

    def _say_no_step(self, report: Report, batches: int) -> None:
        stepped = any(step.new_attempted for step in report.steps)
        if stepped or self._said_no_step or not self._amp.scaler.has_scaled:
            return
        if batches >= self._context._aggregation_frequency:
            self._said_no_step = True
            logger.warning(
                "%d batches went backward, and no optimizer was stepped since the last report: "
                "is a condition of train_batch never met?",
                batches,
            )

    def _say_drift(self, metrics: dict[str, Any]) -> None:
        name = MetricName.LR_DRIFT_STEPS
        drift = max((v for k, v in metrics.items() if k.startswith(name)), default=0)
        if drift and not self._said_drift:
            self._said_drift = True
            logger.warning(
                "a scheduler of context.wrap_lr_scheduler moved on %d skipped steps, which left "
                "the weights alone; amp.wrap_lr_scheduler moves it on applied steps only",
                drift,
            )


def note_on_master(context: pytorch.PyTorchTrialContext, **values: Any) -> None:
    """Note values in the metadata of the run, which the lists of the WebUI can show as columns.

    Only the chief does, and only on a cluster. None removes a value.
    """
    train = context._core.train
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
            context._core.train.set_status(textwrap.shorten(reason, _STATUS_WIDTH))


def _norm(models: Sequence[nn.Module]) -> torch.Tensor | None:
    """The 2-norm of all weights, (), float64, on the device of the first; None without any."""
    known = (p for m in models for p in m.parameters() if not is_lazy(p))
    parameters = [p.detach() for p in known if p.is_floating_point()]
    if not parameters:
        return None
    norms = [norm.double().to(parameters[0].device) for norm in torch._foreach_norm(parameters)]
    total: torch.Tensor = torch.stack(norms).norm()
    return total


def _growth(before: torch.Tensor | None, now: torch.Tensor | None) -> float:
    """How many times as large the weights are; 1 if nothing is known."""
    if before is None or now is None or not before > 0:
        return 1.0
    return float(now.to(before.device) / before)


def _is_not_finite(value: Any) -> bool:
    try:
        return value is not None and not math.isfinite(value)
    except TypeError:  # not a number
        return False


class RunningStatistics:
    """The running statistics of a trial's normalisation layers, kept finite.

    A forward that overflows writes infinity into them although the step is skipped, and validation
    computes NaN from then on. Poisoned ones go back to what they were at the last report. Buffers
    of other modules are left alone: a mask may be -inf.

    Args:
        models: Whose buffers.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        modules = (module for model in models for module in model.modules())
        norms = (m for m in modules if isinstance(m, nn.modules.batchnorm._NormBase))
        buffers = (buffer for norm in norms for buffer in norm.buffers())
        self._buffers = [buffer for buffer in dict.fromkeys(buffers) if buffer.is_floating_point()]
        self._good: list[torch.Tensor] = []

    def remember(self) -> None:
        """Remember the buffers as they are now."""
        self._good = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def repair(self) -> None:
        """Put poisoned buffers back, and remember the others; synchronises once."""
        if not self._buffers:
            return
        poisoned = torch.stack([torch.isfinite(buffer).all() for buffer in self._buffers]) == 0
        for bad, buffer, good in zip(poisoned, self._buffers, self._good, strict=True):
            good.copy_(torch.where(bad, good, buffer))
            buffer.copy_(good)
        count = int(poisoned.sum())
        if count:
            logger.warning(
                "%d running statistics were not finite after an overflow: put back to what they "
                "were at the last report",
                count,
            )
