"""Ends a run that no longer trains, after a checkpoint of its last good state and with the cause.

`GradScaler` skips a step without a word, and goes on for ever. The guard looks at what was read for
the report anyway, so that it costs no synchronisation of its own, and at the same numbers on every
rank, so that all of them stop together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import determined as det
import torch
from determined import pytorch
from torch import nn

from determined_amp.amp.diagnosis import find_cause
from determined_amp.amp.mixed_precision import MixedPrecision, OnOverflow
from determined_amp.amp.precision import Precision
from determined_amp.config.errors import UserError
from determined_amp.config.experiment import Searcher

T = TypeVar("T")

logger = logging.getLogger(__name__)

# A NaN makes the master stop a whole search by these, not only the trial (0.38.1 reads it as a
# string where it wants a number).
_STOPPED_BY_NAN = ("adaptive_asha", "async_halving")

# Optimizer steps that max_skip_ratio is judged over, at least.
MIN_STEPS_TO_JUDGE = 10


class GuardError(UserError):
    """The run no longer trains.

    Args:
        message: What was seen, why, and what to do.
        state_is_good: Whether the weights are worth a checkpoint.
    """

    def __init__(self, message: str, *, state_is_good: bool) -> None:
        super().__init__(message)
        self.state_is_good = state_is_good


class Guard(pytorch.PyTorchCallback):
    """Watches one trial; return it from `build_callbacks`.

    Args:
        context: The trial's context.
        amp: The trial's mixed precision; its settings say what is trouble.
        model: The trial's model, as `wrap_model` returned it.
        train_batch: The trial's own, to train the newest batch again in search of the cause.
        searcher: What a failed trial means to the experiment.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        amp: MixedPrecision,
        model: nn.Module,
        train_batch: Callable[[Any, int, int], object],
        searcher: Searcher,
    ) -> None:
        self._context = context
        self._amp = amp
        self._model = model
        self._train_batch = train_batch
        self._searcher = searcher
        self._statistics = RunningStatistics(model)
        self._newest_batch: Any = None
        self._looked_at = (0, 0)  # applied and skipped steps at the last look at their ratio

    def watch(self, batch: T) -> T:
        """Keep the newest batch, and hand it on."""
        self._newest_batch = batch
        return batch

    def on_training_start(self) -> None:
        self._statistics.remember()
        applied = int(self._amp.applied_steps)
        self._looked_at = (applied, self._amp.attempted_steps - applied)

    def on_training_workload_end(
        self, avg_metrics: dict[str, Any], batch_metrics: dict[str, Any]
    ) -> None:
        """Called on every rank with the same numbers, right after they were reported."""
        self._statistics.repair()
        for found in self._trouble(avg_metrics):
            self._act(f"{found}. {self._cause()}")
            return

    def on_validation_start(self) -> None:
        self._statistics.repair()

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """Called before the metrics are reported: one that is not finite never reaches a search."""
        name = self._searcher.metric
        value = metrics.get(name)
        if value is None or math.isfinite(value):
            return
        found = f"{name} is {value}"
        if self._searcher.name in _STOPPED_BY_NAN:
            raise det.InvalidHP(found)
        self._act(f"{found}. {self._cause()}")

    def _cause(self) -> str:
        """Train the newest batch of every rank again, and say what the first of them found."""
        cause = None
        if self._newest_batch is not None:
            with self._amp.without_steps():
                cause = find_cause(
                    self._model,
                    self._newest_batch,
                    lambda: self._train_batch(self._newest_batch, 0, 0),
                )
        causes = self._context.distributed.allgather(cause)
        return next((f"Cause: {cause}" for cause in causes if cause), "The newest batch is finite")

    def _act(self, message: str) -> None:
        if self._amp.settings.on_overflow is OnOverflow.WARN:
            logger.warning("%s", message)
        elif self._searcher.name != "single":
            raise det.InvalidHP(message)
        else:
            raise GuardError(message, state_is_good=self._scales_the_loss())

    def _trouble(self, metrics: dict[str, Any]) -> Iterator[str]:
        """What is wrong with a report, worst first."""
        settings = self._amp.settings
        skips = int(metrics["consecutive_skips"])
        if not self._scales_the_loss():
            if not math.isfinite(metrics["loss"]):
                yield f"the training loss is {metrics['loss']} in {settings.precision.value}"
            return
        if skips and metrics["loss_scale_log2"] <= math.log2(settings.min_scale):
            yield f"the loss scale is at its floor {settings.min_scale:g} and steps still overflow"
        if skips > settings.max_consecutive_skips:
            yield (
                f"{skips} optimizer steps in a row were skipped, more than "
                f"max_consecutive_skips {settings.max_consecutive_skips}"
            )
        skip_ratio = self._skip_ratio(metrics)
        if skip_ratio > settings.max_skip_ratio:
            yield (
                f"{skip_ratio:.0%} of the optimizer steps since the last look were skipped, "
                f"more than max_skip_ratio {settings.max_skip_ratio:.0%}"
            )

    def _skip_ratio(self, metrics: dict[str, Any]) -> float:
        """Over whole reports, as many as it takes to see ten steps: one skip of one is no trend.

        Nor are those at the start, where the scale finds its level: k bits too high are k skips,
        and then none.
        """
        counts = (metrics["applied_steps"], metrics["skipped_steps"])
        applied, skipped = (now - then for now, then in zip(counts, self._looked_at, strict=True))
        if applied + skipped < MIN_STEPS_TO_JUDGE:
            return 0.0
        found_its_level = self._looked_at[0] == 0 and metrics["consecutive_skips"] == 0
        self._looked_at = counts
        if found_its_level:
            return 0.0
        return float(skipped / (applied + skipped))

    def _scales_the_loss(self) -> bool:
        return self._amp.settings.precision is Precision.AMP_FP16


class RunningStatistics:
    """The floating buffers of a model, such as those of BatchNorm, kept finite.

    A forward that overflows writes infinity into running statistics although the step is skipped,
    and validation computes NaN from then on. A poisoned buffer goes back to what it was at the last
    report.

    Args:
        model: Whose buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._good: list[torch.Tensor] = []

    def remember(self) -> None:
        """Take the buffers as they are for good."""
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
