"""The metrics of a training, summed on the device and read once per report.

Determined averages the dict that `train_batch` returns, but copies every tensor in it to the host
on every batch. A `MetricReducer` is asked once per report instead. Everything here is a sum with a
count, so that a partial last batch or uneven ranks do not bias a mean. A value that was not
measured is not reported.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.counts import DeviceSum
from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.steps import StepsOfEach
from determined_amp.amp.throughput import DataWait, Stopwatch

# The largest finite float16.
FLOAT16_MAX = 65504.0

# The first batches of a process allocate memory and let cuDNN time its algorithms.
WARMUP_BATCHES = 10


@dataclass(frozen=True)
class StepReport:
    """The steps of one optimizer at a report; the same on every slot.

    Args:
        name: What its metrics end in: empty where there is one optimizer, else `_0`, `_1`, ...
        applied: Steps applied since the start of the trial.
        skipped: Steps skipped since then.
        consecutive_skips: Steps skipped since the last applied one.
        new_applied: Steps applied since the last report.
        new_attempted: Steps applied or skipped since then.
    """

    name: str
    applied: int
    skipped: int
    consecutive_skips: int
    new_applied: int
    new_attempted: int


@dataclass(frozen=True)
class Report:
    """What the guard judges; the same on every slot.

    Args:
        loss: Mean over samples of the losses given to `update`; None if none was given.
        scale_of_newest_step: The loss scale of the newest step; 1 without a scaler.
        steps: The steps of every optimizer.
        first_loss: The loss of the first batch of the process, its mean over slots; None before.
    """

    loss: float | None
    scale_of_newest_step: float
    steps: tuple[StepReport, ...]
    first_loss: float | None = None


class TrainingMetrics(StepsOfEach):
    """The steps of every optimizer, and loss, speed and memory since the last report.

    See `MetricName` for what it reports.

    Args:
        device: Where the training computes.
        optimizers: The optimizers of the training; more may come later.
        slots: The number of processes of the training.
        scales: Returns the current scale and that of the newest step, each (), on the device.
        scaled: Whether a loss scale multiplies the gradients.

    Attributes:
        batches: Batches counted since the last report.
        latest: The newest report; None before the first.
        trial_reports_loss: Set it if the trial itself returns a metric `loss`, which then wins.
        drifting: The optimizers with a scheduler that moves on skipped steps, too.
    """

    def __init__(
        self,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        slots: int,
        scales: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        *,
        scaled: bool,
    ) -> None:
        super().__init__(device, optimizers, scaled=scaled)
        self._slots = slots
        self._scales = scales
        self._loss_sum = DeviceSum(device)
        self._losses = 0
        self._first_loss: torch.Tensor | None = None
        self.batches = 0
        self._timed_samples = 0
        self._wait = DataWait(device)
        self._stopwatch = Stopwatch(device)
        self._batches_of_process = 0
        self._peaks: dict[str, float] = {}
        self.latest: Report | None = None
        self.trial_reports_loss = False
        self.drifting: frozenset[torch.optim.Optimizer] = frozenset()

    def add(
        self, loss: torch.Tensor | None, samples: int | None, *, again: bool = False
    ) -> dict[str, float]:
        """Count one batch. No synchronisation.

        Args:
            loss: Mean loss of the batch, (), on the device.
            samples: Samples in the batch; None counts it as one and measures no speed.
            again: Whether this batch has been counted before, so that only the loss is new.

        Returns:
            What `train_batch` must return. Determined 0.38.1 wants a metric from every rank if
            there are several (an empty dict is an IndexError on the chief), and costs time for
            each; so it gets one plain number then, and none otherwise.
        """
        weight = 1 if samples is None else samples
        if loss is not None:
            self._loss_sum.add(loss.detach(), weight)
            self._losses += weight
            if self._first_loss is None:
                self._first_loss = loss
        if not again:
            self._count(samples)
        if self._stopwatch.running:
            self._wait.begin()
        return {"batch_samples": float(weight)} if self._slots > 1 else {}

    def _count(self, samples: int | None) -> None:
        self.batches += 1
        self._batches_of_process += 1
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
            self._wait.end(seconds)

    def reset(self) -> None:
        """Called by Determined before every stretch of training and every validation."""
        self._loss_sum.reset()
        for steps in self.all():
            steps.reset()
        self._losses = 0
        self._wait.reset()
        self.batches = 0
        self._timed_samples = 0
        self._stopwatch.stop()
        if self._batches_of_process >= WARMUP_BATCHES:
            self._stopwatch.start()
            self._wait.begin()
            forget_peak_memory(self._device)  # that of a validation

    def per_slot_reduce(self) -> dict[str, Any]:
        """Read the sums: the one synchronisation of a report."""
        seconds = self._stopwatch.seconds()
        for name, peak in peak_memory_mib(self._device).items():
            self._peaks[name] = max(peak, self._peaks.get(name, 0.0))
        everything = self.all()
        on_host = [
            (
                steps.counts.attempted,
                steps.attempted_before,
                steps.has_norm,
                optimizer in self.drifting,
            )
            for optimizer, steps in zip(self._optimizers, everything, strict=True)
        ]
        total = self._loss_sum.total()
        first_loss = total if self._first_loss is None else self._first_loss
        on_device = [total, first_loss, *self._scales()]
        for steps in everything:
            on_device.extend(steps.on_device())
        loss, first, scale, used, *numbers = torch.stack(
            [value.double() for value in on_device]
        ).tolist()
        return {
            "loss_sum": loss,
            "losses": self._losses,
            "first_loss": first,
            "loss_scale": scale,
            "scale_of_newest_step": used,
            "optimizers": [[*numbers[5 * i : 5 * i + 5], *more] for i, more in enumerate(on_host)],
            MetricName.SAMPLES_PER_SECOND: self._timed_samples / seconds if seconds else 0.0,
            MetricName.DATA_WAIT_SHARE: self._wait_share(seconds),
            **self._peaks,
        }

    def cross_slot_reduce(self, per_slot_metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Join the slots. Scale and steps are those of the slot that has made the most steps.

        They are the same on all of them, unless some have run out of data.
        """
        slots = per_slot_metrics
        first = max(slots, key=lambda slot: sum(numbers[5] for numbers in slot["optimizers"]))
        losses = sum(s["losses"] for s in slots)
        loss = sum(s["loss_sum"] for s in slots) / losses if losses else None
        scale = first["loss_scale"]
        metrics: dict[str, Any] = {}
        if loss is not None and not self.trial_reports_loss:
            metrics[MetricName.LOSS] = loss
        if self._scaled:
            metrics[MetricName.LOSS_SCALE_LOG2] = math.log2(scale) if scale else -math.inf
        steps = []
        several = len(first["optimizers"]) > 1
        for number, numbers in enumerate(first["optimizers"]):
            step = _step_report(f"_{number}" if several else "", numbers)
            metrics.update(self._metrics_of(step, numbers))
            steps.append(step)
        for name in (MetricName.PEAK_MEMORY_MIB, MetricName.PEAK_RESERVED_MEMORY_MIB):
            if name in first:
                metrics[name] = max(s[name] for s in slots)
        speed = sum(s[MetricName.SAMPLES_PER_SECOND] for s in slots)
        if speed:
            metrics[MetricName.SAMPLES_PER_SECOND] = speed
            waits = [
                s[MetricName.DATA_WAIT_SHARE]
                for s in slots
                if s[MetricName.DATA_WAIT_SHARE] is not None
            ]
            if waits:
                metrics[MetricName.DATA_WAIT_SHARE] = min(1.0, max(waits))
        first_loss = None if loss is None else sum(s["first_loss"] for s in slots) / len(slots)
        self.latest = Report(loss, first["scale_of_newest_step"], tuple(steps), first_loss)
        return metrics

    def suffix(self, optimizer: torch.optim.Optimizer) -> str:
        """What the names of an optimizer's metrics end in; nothing if there is only one."""
        several = len(self._optimizers) > 1
        return f"_{self._optimizers.index(optimizer)}" if several else ""

    def _wait_share(self, seconds: float) -> float | None:
        waited = self._wait.seconds()
        return None if waited is None or not seconds else waited / seconds

    def _metrics_of(self, step: StepReport, numbers: Sequence[float]) -> dict[str, Any]:
        norm, largest, *_, has_norm, drifts = numbers
        new = step.new_attempted
        metrics: dict[str, Any] = {MetricName.APPLIED_STEPS: step.applied}
        if self._scaled:
            metrics[MetricName.SKIPPED_STEPS] = step.skipped
        # Before the first skip these would be charts of zeros.
        if step.skipped:
            metrics[MetricName.CONSECUTIVE_SKIPS] = step.consecutive_skips
        if step.skipped and new:
            metrics[MetricName.SKIP_RATIO] = 1.0 - step.new_applied / new
        if step.skipped and drifts:
            metrics[MetricName.LR_DRIFT_STEPS] = step.skipped
        if largest:
            metrics[MetricName.HEADROOM_BITS] = math.log2(FLOAT16_MAX / largest)
        if has_norm and step.new_applied:
            metrics[MetricName.GRAD_NORM] = norm / step.new_applied
        return {name + step.name: value for name, value in metrics.items()}


def _step_report(name: str, numbers: Sequence[float]) -> StepReport:
    _, _, applied, applied_before, consecutive, attempted, attempted_before, *_ = numbers
    return StepReport(
        name=name,
        applied=int(applied),
        skipped=int(attempted - applied),
        consecutive_skips=int(consecutive),
        new_applied=int(applied - applied_before),
        new_attempted=int(attempted - attempted_before),
    )


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """The largest memory use so far in MiB: of torch on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return {
            MetricName.PEAK_MEMORY_MIB: torch.cuda.max_memory_allocated(device) / 2**20,
            MetricName.PEAK_RESERVED_MEMORY_MIB: torch.cuda.max_memory_reserved(device) / 2**20,
        }
    return {MetricName.PEAK_MEMORY_MIB: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak of a GPU; that of a process cannot be reset. No synchronisation.

    On the first batches cuDNN tries algorithms that can need far more memory than the one it
    chooses, and the audit holds memory of its own.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
