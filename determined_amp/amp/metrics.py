"""What a trial reports, summed on the device and read once per report.

Determined averages the dict that `train_batch` returns, but copies every tensor in it to the host
on every batch. A `MetricReducer` is asked once per report instead. Everything here is a sum with a
count, so that a partial last batch or uneven ranks do not bias a mean.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable
from typing import Any

import torch
from determined import pytorch

from determined_amp.amp.diagnosis import FLOAT16_MAX
from determined_amp.amp.mixed_precision import MixedPrecision

# The first batches of a process allocate memory and let cuDNN time its algorithms.
WARMUP_BATCHES = 10

# Optimizer steps between two looks at the largest gradient, which reads all of them.
HEADROOM_PERIOD = 10


class TrainingMetrics(pytorch.MetricReducer):
    """Loss, scale, steps, speed and memory of the batches since the last report.

    Reported names:
        loss: Mean over samples of the training loss.
        grad_norm: Mean over applied steps of the unscaled gradient norm, before clipping; if the
            trial clips.
        loss_scale_log2: log2 of the loss scale at the report; 0 without a scaler.
        applied_steps, skipped_steps: Optimizer steps since the start of the trial.
        consecutive_skips: Optimizer steps skipped since the last applied one.
        skip_ratio: Skipped share of this report's optimizer steps.
        headroom_bits: log2 of 65504 over the largest scaled gradient of a parameter; the smallest
            of the report, looked at on every tenth step. `amp_fp16` only.
        samples_per_second: Over all slots, first batches of the process excluded.
        data_wait_share: Share of that time that the loop waited for data; the largest over slots.
        peak_memory_mib: Largest over slots; allocated by torch on a GPU, where the first batches
            of the process are forgotten after them; resident on a CPU.
        peak_reserved_memory_mib: The same for what torch holds of a GPU.

    Args:
        context: The trial's context; registers itself there.
        amp: The trial's mixed precision.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext, amp: MixedPrecision) -> None:
        self._amp = amp
        self._slots: int = context.distributed.size
        self._loss_sum = DeviceSum(amp.device)
        self._norm_sum = DeviceSum(amp.device, finite_only=True)
        self._largest_gradient = torch.zeros((), device=amp.device)
        self._has_norm = False
        self._has_headroom = False
        self._waited = 0.0
        self._stopwatch = Stopwatch(amp.device)
        self._batches_of_process = 0
        self._applied_before = amp.applied_steps.clone()
        self._attempted_before = amp.attempted_steps
        self.reset()
        context.wrap_reducer(self, for_validation=False)

    def add(self, loss: torch.Tensor, samples: int) -> dict[str, float]:
        """Count one batch. No synchronisation.

        Args:
            loss: Mean loss of the batch, (), on the device.
            samples: Samples in the batch.

        Returns:
            What `train_batch` must return. Determined 0.38.1 wants a metric from every rank if
            there are several (an empty dict is an IndexError on the chief), and costs time for
            each; so it gets one plain number then, and none otherwise.
        """
        self._loss_sum.add(loss.detach(), samples)
        self._samples += samples
        self._batches_of_process += 1
        if self._batches_of_process == WARMUP_BATCHES:
            forget_peak_memory(self._amp.device)
        if self._stopwatch.running:
            self._timed_samples += samples
        elif self._batches_of_process >= WARMUP_BATCHES:
            self._stopwatch.start()
        return {"batch_samples": float(samples)} if self._slots > 1 else {}

    def add_grad_norm(self, norm: torch.Tensor) -> None:
        """Count the gradient norm of one step, (), on the device; ignored if not finite."""
        self._has_norm = True
        self._norm_sum.add(norm)

    def add_scaled_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look at the gradients of one step before they are unscaled, on every tenth step.

        No synchronisation. Gradients that are not finite are left out: their step is skipped.
        """
        if not self._amp.scaler.is_enabled() or self._amp.attempted_steps % HEADROOM_PERIOD:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients, math.inf))
        largest = torch.nan_to_num(norms.max(), nan=0.0, posinf=0.0)
        torch.maximum(self._largest_gradient, largest, out=self._largest_gradient)
        self._has_headroom = True

    def waited(self, seconds: float) -> None:
        """Count the time that the loop waited for one batch."""
        if self._stopwatch.running:
            self._waited += seconds

    def reset(self) -> None:
        """Called by Determined before every stretch of training and every validation."""
        self._loss_sum.reset()
        self._norm_sum.reset()
        self._largest_gradient.zero_()
        self._has_headroom = False
        self._waited = 0.0
        self._samples = 0
        self._timed_samples = 0
        self._stopwatch.stop()
        if self._batches_of_process >= WARMUP_BATCHES:
            self._stopwatch.start()
        self._applied_before.copy_(self._amp.applied_steps)
        self._attempted_before = self._amp.attempted_steps

    def per_slot_reduce(self) -> dict[str, float]:
        """Read the sums: the one synchronisation of a report."""
        amp = self._amp
        seconds = self._stopwatch.seconds()
        on_device = (
            self._loss_sum.total(),
            self._norm_sum.total(),
            amp.loss_scale(),
            amp.applied_steps,
            self._applied_before,
            amp.consecutive_skips(),
            self._largest_gradient,
        )
        loss, norm, scale, applied, applied_before, consecutive, largest = torch.stack(
            [value.double() for value in on_device]
        ).tolist()
        return {
            "loss_sum": loss,
            "samples": self._samples,
            "norm_sum": norm,
            "loss_scale": scale,
            "applied_steps": applied,
            "attempted_steps": amp.attempted_steps,
            "new_applied": applied - applied_before,
            "new_attempted": amp.attempted_steps - self._attempted_before,
            "consecutive_skips": consecutive,
            "largest_gradient": largest,
            "samples_per_second": self._timed_samples / seconds if seconds else 0.0,
            "data_wait_share": self._waited / seconds if seconds else 0.0,
            **peak_memory_mib(amp.device),
        }

    def cross_slot_reduce(self, per_slot_metrics: list[dict[str, float]]) -> dict[str, Any]:
        """Join the slots. Scale and steps are the same on all of them."""
        slots, first = per_slot_metrics, per_slot_metrics[0]
        steps = first["new_attempted"]
        metrics: dict[str, Any] = {
            "loss": _ratio(sum(s["loss_sum"] for s in slots), sum(s["samples"] for s in slots)),
            "loss_scale_log2": math.log2(first["loss_scale"]) if first["loss_scale"] else -math.inf,
            "applied_steps": int(first["applied_steps"]),
            "skipped_steps": int(first["attempted_steps"] - first["applied_steps"]),
            "consecutive_skips": int(first["consecutive_skips"]),
            "skip_ratio": 1.0 - first["new_applied"] / steps if steps else 0.0,
        }
        for name in ("peak_memory_mib", "peak_reserved_memory_mib"):
            if name in first:
                metrics[name] = max(s[name] for s in slots)
        if self._has_headroom and first["largest_gradient"]:
            metrics["headroom_bits"] = math.log2(FLOAT16_MAX / first["largest_gradient"])
        if self._has_norm and first["new_applied"]:
            metrics["grad_norm"] = first["norm_sum"] / first["new_applied"]
        speed = sum(s["samples_per_second"] for s in slots)
        if speed:
            metrics["samples_per_second"] = speed
            metrics["data_wait_share"] = min(1.0, max(s["data_wait_share"] for s in slots))
        return metrics


class DeviceSum:
    """A float64 sum of many small device tensors, added up a handful at a time.

    Adding each on its own costs the host several kernels per batch; to keep it costs nothing.

    Args:
        device: Where the sum is.
        finite_only: Leave out what is not finite.
    """

    _HANDFUL = 64

    def __init__(self, device: torch.device, *, finite_only: bool = False) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._finite_only = finite_only
        self._waiting: list[torch.Tensor] = []
        self._weight = 1

    def add(self, value: torch.Tensor, weight: int = 1) -> None:
        """Count `weight` times a tensor, (), that nobody changes any more. No synchronisation."""
        if weight != self._weight or len(self._waiting) == self._HANDFUL:
            self.total()
            self._weight = weight
        self._waiting.append(value)

    def total(self) -> torch.Tensor:
        """The sum, (), float64, on the device. No synchronisation."""
        if self._waiting:
            values = torch.stack(self._waiting).double()
            if self._finite_only:
                values = torch.nan_to_num(values, nan=0.0, posinf=0.0)
            self._sum.add_(values.sum(), alpha=self._weight)
            self._waiting.clear()
        return self._sum

    def reset(self) -> None:
        self._waiting.clear()
        self._sum.zero_()


class ClassificationMetrics(pytorch.MetricReducer):
    """`validation_loss` (nats) and `validation_accuracy` in [0, 1], exact means over samples.

    Args:
        context: The trial's context; registers itself there.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=context.device)
        self._samples = 0
        context.wrap_reducer(self, for_training=False)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
        """Count one batch; the cross-entropy is computed in float32. No synchronisation.

        Args:
            logits: (B, C), any floating dtype.
            labels: (B,), int64.

        Returns:
            What `evaluate_batch` must return: nothing, the reducer reports.
        """
        loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        correct = (logits.argmax(dim=1) == labels).sum()
        self._sums.add_(torch.stack([loss, correct]))
        self._samples += len(labels)
        return {}

    def reset(self) -> None:
        self._sums.zero_()
        self._samples = 0

    def per_slot_reduce(self) -> tuple[float, float, int]:
        loss, correct = self._sums.tolist()
        return loss, correct, self._samples

    def cross_slot_reduce(self, per_slot_metrics: list[tuple[float, float, int]]) -> dict[str, Any]:
        losses, corrects, samples = (sum(column) for column in zip(*per_slot_metrics, strict=True))
        return {
            "validation_loss": _ratio(losses, samples),
            "validation_accuracy": _ratio(corrects, samples),
        }


class Stopwatch:
    """Seconds the device spent, without waiting for it to start: CUDA events, or the clock.

    Args:
        device: Whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: Any = None

    @property
    def running(self) -> bool:
        return self._started is not None

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        self._started = None

    def seconds(self) -> float:
        """Seconds since `start`, 0 if it was not started; waits for the device."""
        if self._started is None:
            return 0.0
        now = self._now()
        if self._cuda:
            now.synchronize()
            return float(self._started.elapsed_time(now)) / 1000.0
        return float(now - self._started)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record()
        return event


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """The largest memory use so far in MiB: of torch on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return {
            "peak_memory_mib": torch.cuda.max_memory_allocated(device) / 2**20,
            "peak_reserved_memory_mib": torch.cuda.max_memory_reserved(device) / 2**20,
        }
    return {"peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}


def forget_peak_memory(device: torch.device) -> None:
    """Have the peak of a GPU start anew; that of a process cannot. No synchronisation.

    What cuDNN tries out on the first batch allocates work space, some of it far larger than what
    it then uses, and the audit keeps its books.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
