"""The metrics of a training, summed on the device and read once per report.

Determined averages the dict that `train_batch` returns, but copies every tensor in it
to the host on every batch. A `MetricReducer` is asked once per report instead.
Everything here is a sum with a count, so that a partial last batch or uneven ranks do
not bias a mean. A value that was not measured is not reported.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.optim import Optimizer

from determined_amp.amp.counts import DeviceSum
from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.plain_data import Metrics
from determined_amp.amp.scaler import LossScaler
from determined_amp.amp.throughput import Stopwatch
from determined_amp.amp.window import Window

# The largest finite float16.
FLOAT16_MAX = 65504.0

# The first batches of a process allocate memory and let cuDNN time its algorithms.
WARMUP_BATCHES = 10


@dataclass(frozen=True)
class StepReport:
    """The steps of one optimizer at a report; the same on every slot.

    Args:
        name: The ending of its metric names: empty for a single optimizer, else `_0`,
            `_1`, ...
        applied: Steps applied since the start of the trial.
        skipped: Steps skipped since the start of the trial.
        consecutive_skips: Steps skipped since the last applied one.
        new_applied: Steps applied since the last report.
        new_attempted: Steps applied or skipped since the last report.
        grad_norm: The mean gradient norm of the `new_applied` steps; None if it was not
            measured.
        largest_gradient: The largest scaled gradient since the last report; 0 if there
            was none.
        drifts: Whether the optimizer has a scheduler that moves on skipped steps, too.
        began: Applied and skipped steps before this run.
    """

    name: str
    applied: int
    skipped: int
    consecutive_skips: int
    new_applied: int
    new_attempted: int
    grad_norm: float | None = None
    largest_gradient: float = 0.0
    drifts: bool = False
    began: tuple[int, int] = (0, 0)


class TrainingMetrics:
    """Collects steps, loss, speed and memory between two reports.

    See `MetricName` for what it reports.

    Args:
        device: Where the training computes.
        scaler: The scaler of the training, which has the windows of the optimizers.
        slots: The number of processes of the training.

    Attributes:
        latest: The steps of each optimizer in the newest report; None before the first.
        loss: The mean loss over the samples of the newest report; None if `update` got
            no loss.
        left_out: How many batches of the newest report made no step and had a loss that
            is not finite, on the slot with the most of them.
        batches: How many batches the newest report covers.
        scale_of_newest_step: The loss scale of the newest step; 1 without a scaler.
        trial_reports_loss: Set it to True if the trial itself returns a metric `loss`,
            which is then reported instead.
        drifting: The optimizers with a scheduler that moves on skipped steps, too.
        once: Metrics for the next report only, such as the audit's. Only those of the
            chief are reported.
    """

    def __init__(
        self,
        device: torch.device,
        scaler: LossScaler,
        slots: int,
    ) -> None:
        self.windows = scaler.windows
        self._device = device
        self._scaler = scaler
        self._scaled = scaler.is_enabled()
        self._slots = slots
        self._loss_sum = DeviceSum(device)
        self._losses = 0
        self._batches = 0
        self._timed_samples = 0
        self._waited: float | None = None
        self._stopwatch = Stopwatch(device)
        self._batches_of_process = 0
        self._peaks: dict[str, float] = {}
        self.latest: list[StepReport] | None = None
        self.loss: float | None = None
        self.left_out = self.batches = 0
        self.scale_of_newest_step = 1.0
        self.trial_reports_loss = False
        self.drifting: frozenset[Optimizer] = frozenset()
        self.once: dict[str, float] = {}

    def add(
        self,
        loss: torch.Tensor | None,
        samples: int | None,
        *,
        again: bool = False,
    ) -> dict[str, float]:
        """Count one batch. No synchronisation.

        Args:
            loss: Mean loss of the batch, (), on the device, detached.
            samples: Samples in the batch; the loss of 0 is not reported. None counts
                as one and measures no speed.
            again: Whether this batch has been counted before, so that only the loss is
                new.

        Returns:
            What `train_batch` must return. With several ranks, Determined 0.38.1 needs
            a metric from each: an empty dict is an IndexError on the chief. Each metric
            costs time, so this is one plain number then, and empty otherwise.
        """
        if not again:
            self._count(samples)
        weight = 1 if samples is None else samples
        if not weight:
            loss = None  # the mean over no sample is NaN
        self._scaler.left_out.end_batch(None if again else loss)
        if loss is not None:
            self._loss_sum.add(loss, weight)
            self._losses += weight
        return {"batch_samples": float(weight)} if self._slots > 1 else {}

    def _count(self, samples: int | None) -> None:
        self._batches_of_process += 1
        self._batches += 1
        if self._batches_of_process == WARMUP_BATCHES:
            forget_peak_memory(self._device)
            self._peaks.clear()
        if self._stopwatch.running:
            self._timed_samples += samples or 0
        elif self._batches_of_process >= WARMUP_BATCHES:
            self._stopwatch.start()

    def waited(self, seconds: float) -> None:
        """Count the seconds that the loop has just waited for a batch."""
        if self._stopwatch.running:
            self._waited = (self._waited or 0.0) + seconds

    def reset(self) -> None:
        """Begin a new report. Determined also calls it before every validation."""
        self.once = {}
        self._loss_sum.reset()
        for window in self.windows.all():
            window.begin_report()
        self._scaler.left_out.count.reset()
        self._losses = self._batches = 0
        self._waited = None
        self._timed_samples = 0
        self._stopwatch.stop()
        if self._batches_of_process >= WARMUP_BATCHES:
            self._stopwatch.start()
            forget_peak_memory(self._device)  # the peak of a validation

    def restart(self) -> None:
        """Leave out what came since the last report, such as a validation."""
        if self._stopwatch.running:
            self._stopwatch.start()
            forget_peak_memory(self._device)

    def per_slot_reduce(self) -> dict[str, Any]:
        """Read all sums at once; synchronises, as does the stopwatch on a GPU."""
        seconds = self._stopwatch.seconds()
        for name, peak in peak_memory_mib(self._device).items():
            self._peaks[name] = max(peak, self._peaks.get(name, 0.0))
        total = self._loss_sum.total()
        of_each = self.windows.all()
        on_device = [
            (total, self._scaler.left_out.count.total(), *self._scaler.loss_scales()),
            *(each.report_tensors() for each in of_each),
        ]
        (loss, left_out, scale, used), *numbers = read_at_once(on_device)
        counted = zip(of_each, numbers, strict=True)
        return {
            "loss_sum": loss,
            "losses": self._losses,
            "left_out": int(left_out),
            "batches": self._batches,
            "once": self.once,
            "loss_scale": scale,
            "scale_of_newest_step": used,
            "steps": [self._report_of(*each) for each in counted],
            **self._speed(seconds),
            **self._peaks,
        }

    def _speed(self, seconds: float) -> dict[str, float]:
        if not seconds or not self._timed_samples:
            return {}
        speed = {MetricName.SAMPLES_PER_SECOND: self._timed_samples / seconds}
        # the wait for a batch may have begun before the stopwatch started
        if self._waited is not None:
            speed[MetricName.DATA_WAIT_SHARE] = min(1.0, self._waited / seconds)
        return speed

    def _report_of(self, window: Window, numbers: Sequence[float]) -> StepReport:
        """The report of one optimizer, from the numbers of its `report_tensors`."""
        norm_sum, largest, *counted = numbers
        applied, applied_before, consecutive_skips = map(int, counted)
        attempted = window.counts.attempted
        new_applied = applied - applied_before
        new_attempted = attempted - window.attempted_before
        # A mean over some of the steps would look like one over all.
        has_all = window.norms == new_attempted
        grad_norm = norm_sum / new_applied if new_applied and has_all else None
        return StepReport(
            name=self.windows.suffix(window.optimizer),
            applied=applied,
            skipped=attempted - applied,
            consecutive_skips=consecutive_skips,
            new_applied=new_applied,
            new_attempted=new_attempted,
            grad_norm=grad_norm,
            largest_gradient=largest,
            drifts=window.optimizer in self.drifting,
            began=window.counts.began,
        )

    def cross_slot_reduce(
        self, per_slot_metrics: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Combine the slots into one report.

        Scale and steps come from the slot with the most steps. They are the same on all
        slots, unless some have run out of data.
        """
        slots = per_slot_metrics
        furthest = max(slots, key=_attempted_steps)
        losses = sum(slot["losses"] for slot in slots)
        self.loss = None
        if losses:
            self.loss = sum(slot["loss_sum"] for slot in slots) / losses
        self.left_out = max(slot["left_out"] for slot in slots)
        self.batches = max(slot["batches"] for slot in slots)
        self.latest = furthest["steps"]
        self.scale_of_newest_step = furthest["scale_of_newest_step"]
        metrics: Metrics = dict(slots[0]["once"])
        if self.loss is not None and not self.trial_reports_loss:
            metrics[MetricName.LOSS] = self.loss
        if self._scaled:
            scale = furthest["loss_scale"]
            log2 = math.log2(scale) if scale else -math.inf
            metrics[MetricName.LOSS_SCALE_LOG2] = log2
        for step in self.latest:
            metrics.update(_metrics_of(step, scaled=self._scaled))
        for name, join in _JOINED.items():
            values = [slot[name] for slot in slots if slot.get(name) is not None]
            if values:
                metrics[name] = join(values)
        return metrics


# How to combine the values that each slot measures by itself.
_JOINED: dict[str, Callable[[Sequence[float]], float]] = {
    MetricName.SAMPLES_PER_SECOND: sum,
    MetricName.DATA_WAIT_SHARE: max,
    MetricName.PEAK_MEMORY_MIB: max,
    MetricName.PEAK_RESERVED_MEMORY_MIB: max,
}


def _metrics_of(step: StepReport, *, scaled: bool) -> dict[str, float]:
    """The metrics of one optimizer. Some are left out until a step is skipped."""
    values: dict[str, float] = {MetricName.APPLIED_STEPS: step.applied}
    if scaled:
        values[MetricName.SKIPPED_STEPS] = step.skipped
    if step.skipped:
        values[MetricName.CONSECUTIVE_SKIPS] = step.consecutive_skips
    if step.skipped and step.new_attempted:
        values[MetricName.SKIP_RATIO] = 1.0 - step.new_applied / step.new_attempted
    if step.skipped and step.drifts:
        values[MetricName.LR_DRIFT_STEPS] = step.skipped
    if step.largest_gradient:
        values[MetricName.HEADROOM_BITS] = math.log2(
            FLOAT16_MAX / step.largest_gradient
        )
    if step.grad_norm is not None:
        values[MetricName.GRAD_NORM] = step.grad_norm
    return {name + step.name: value for name, value in values.items()}


def _attempted_steps(slot: dict[str, Any]) -> int:
    return sum(step.applied + step.skipped for step in slot["steps"])


def read_at_once(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[float]]:
    """Read groups of tensors, each (), in one transfer; return their numbers."""
    tensors = [tensor.double() for group in groups for tensor in group]
    numbers = iter(torch.stack(tensors).tolist())
    return [list(islice(numbers, len(group))) for group in groups]


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """The peak memory so far in MiB: of torch on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return {
            MetricName.PEAK_MEMORY_MIB: torch.cuda.max_memory_allocated(device) / 2**20,
            MetricName.PEAK_RESERVED_MEMORY_MIB: torch.cuda.max_memory_reserved(device)
            / 2**20,
        }
    return {
        MetricName.PEAK_MEMORY_MIB: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        / 2**10
    }


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak of a GPU. A process's peak cannot be reset. No synchronisation.

    On the first batches cuDNN tries algorithms that may need far more memory than the
    one it chooses, and the audit needs memory, too.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
