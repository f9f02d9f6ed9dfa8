"""What is reported is a mean over samples and a count of steps, read once per report."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from determined_amp.amp.metrics import (
    HEADROOM_PERIOD,
    WARMUP_BATCHES,
    ClassificationMetrics,
    DeviceSum,
    Stopwatch,
    TrainingMetrics,
    forget_peak_memory,
)
from determined_amp.amp.mixed_precision import AmpSettings, MixedPrecision
from determined_amp.amp.precision import Precision


class Processes:
    """The one fact that the metrics ask of the ranks."""

    def __init__(self, size: int) -> None:
        self.size = size


class Context:
    """As much of a trial's context as metrics and mixed precision use."""

    device = torch.device("cpu")

    def __init__(self, slots: int = 1) -> None:
        self.distributed = Processes(slots)
        self.registered: list[tuple[Any, dict[str, bool]]] = []

    def wrap_scaler(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        return scaler

    def wrap_reducer(self, reducer: Any, **when: bool) -> Any:
        self.registered.append((reducer, when))
        return reducer


def training_metrics(slots: int = 1) -> TrainingMetrics:
    context: Any = Context(slots)
    return TrainingMetrics(context, MixedPrecision(context, AmpSettings(Precision.AMP_FP16)))


class TestTrainingMetrics:
    def test_loss_is_the_mean_over_samples(self) -> None:
        """(3 * 1 + 1 * 5) / 4 = 2, where the mean over batches would be 3."""
        metrics = training_metrics()
        metrics.add(torch.tensor(1.0), 3)
        metrics.add(torch.tensor(5.0), 1)
        assert metrics.cross_slot_reduce([metrics.per_slot_reduce()])["loss"] == 2

    def test_loss_of_uneven_slots_is_the_mean_over_samples(self) -> None:
        one, other = training_metrics(2), training_metrics(2)
        one.add(torch.tensor(1.0), 3)
        other.add(torch.tensor(5.0), 1)
        slots = [one.per_slot_reduce(), other.per_slot_reduce()]
        assert one.cross_slot_reduce(slots)["loss"] == 2

    def test_reset_begins_a_new_report(self) -> None:
        metrics = training_metrics()
        metrics.add(torch.tensor(1.0), 3)
        metrics.reset()
        metrics.add(torch.tensor(7.0), 1)
        assert metrics.cross_slot_reduce([metrics.per_slot_reduce()])["loss"] == 7

    def test_report_without_a_batch_is_not_a_number(self) -> None:
        metrics = training_metrics()
        assert math.isnan(metrics.cross_slot_reduce([metrics.per_slot_reduce()])["loss"])

    def test_scale_is_reported_as_its_logarithm(self) -> None:
        metrics = training_metrics()
        assert metrics.cross_slot_reduce([metrics.per_slot_reduce()])["loss_scale_log2"] == 16

    def test_batch_returns_a_number_only_where_determined_needs_one(self) -> None:
        """Determined 0.38.1: an empty dict is an IndexError with several slots, free with one."""
        loss = torch.tensor(1.0)
        assert training_metrics(slots=1).add(loss, 4) == {}
        assert training_metrics(slots=2).add(loss, 4) == {"batch_samples": 4.0}

    def test_grad_norm_leaves_skipped_steps_out(self) -> None:
        """Norms 2, inf (skipped), 4: the mean over the two applied steps is 3."""
        context: Any = Context()
        amp = MixedPrecision(context, AmpSettings(Precision.AMP_FP16))
        metrics = TrainingMetrics(context, amp)
        for norm in (2.0, math.inf, 4.0):
            metrics.add_grad_norm(torch.tensor(norm))
        amp.applied_steps += 2
        amp.attempted_steps += 3
        report = metrics.cross_slot_reduce([metrics.per_slot_reduce()])
        assert report["grad_norm"] == 3
        assert report["skip_ratio"] == pytest.approx(1 / 3)

    def test_speed_leaves_the_first_batches_out(self) -> None:
        """Nothing is said about speed until the process has warmed up."""
        metrics = training_metrics()
        for _ in range(WARMUP_BATCHES):
            metrics.add(torch.tensor(1.0), 8)
        assert metrics.per_slot_reduce()["samples_per_second"] == 0
        assert "samples_per_second" not in metrics.cross_slot_reduce([metrics.per_slot_reduce()])
        metrics.add(torch.tensor(1.0), 8)
        assert metrics.per_slot_reduce()["samples_per_second"] > 0

    def test_peak_memory_of_the_first_batches_is_forgotten_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        metrics = training_metrics()
        forgotten: list[torch.device] = []
        monkeypatch.setattr("determined_amp.amp.metrics.forget_peak_memory", forgotten.append)
        for _ in range(WARMUP_BATCHES - 1):
            metrics.add(torch.tensor(1.0), 8)
        assert forgotten == []
        for _ in range(2 * WARMUP_BATCHES):
            metrics.add(torch.tensor(1.0), 8)
            metrics.reset()
        assert forgotten == [torch.device("cpu")]

    def test_headroom_is_that_of_the_largest_scaled_gradient(self) -> None:
        """log2(65504 / 2^10) = 5.9993; the infinite gradient belongs to a skipped step."""
        metrics = training_metrics()
        small, large, infinite = (nn.Parameter(torch.zeros(2)) for _ in range(3))
        small.grad, large.grad = torch.tensor([1.0, -2.0]), torch.tensor([-(2.0**10), 3.0])
        metrics.add_scaled_gradients([small, large])
        infinite.grad = torch.tensor([math.inf, 0.0])
        metrics.add_scaled_gradients([infinite])
        report = metrics.cross_slot_reduce([metrics.per_slot_reduce()])
        assert report["headroom_bits"] == pytest.approx(math.log2(65504) - 10, abs=1e-6)

    def test_headroom_is_looked_at_on_every_tenth_step(self) -> None:
        context: Any = Context()
        amp = MixedPrecision(context, AmpSettings(Precision.AMP_FP16))
        metrics = TrainingMetrics(context, amp)
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = torch.ones(1)
        amp.attempted_steps = HEADROOM_PERIOD - 1
        metrics.add_scaled_gradients([parameter])
        assert "headroom_bits" not in metrics.cross_slot_reduce([metrics.per_slot_reduce()])

    def test_wait_for_data_is_a_share_of_the_timed_batches(self) -> None:
        """What was waited before the warm-up ended is not counted."""
        metrics = training_metrics()
        for _ in range(WARMUP_BATCHES):
            metrics.waited(1e9)
            metrics.add(torch.tensor(1.0), 8)
        metrics.waited(1e-9)
        metrics.add(torch.tensor(1.0), 8)
        report = metrics.cross_slot_reduce([metrics.per_slot_reduce()])
        assert 0 < report["data_wait_share"] < 1

    def test_is_asked_in_training_only(self) -> None:
        context: Any = Context()
        amp = MixedPrecision(context, AmpSettings(Precision.FP32))
        metrics = TrainingMetrics(context, amp)
        assert context.registered == [(metrics, {"for_validation": False})]


class TestClassificationMetrics:
    def test_means_are_over_samples_of_all_slots(self) -> None:
        """Logits (0, ln 3): p = 1/4, 3/4. Losses ln 4, ln 4/3 twice; two of three are right."""
        context: Any = Context(2)
        one, other = ClassificationMetrics(context), ClassificationMetrics(context)
        logits = torch.tensor([[0.0, math.log(3.0)]])
        one.add(logits.repeat(2, 1), torch.tensor([0, 1]))
        other.add(logits, torch.tensor([1]))
        report = one.cross_slot_reduce([one.per_slot_reduce(), other.per_slot_reduce()])
        loss = (math.log(4) + 2 * math.log(4 / 3)) / 3
        assert report["validation_loss"] == pytest.approx(loss, rel=1e-6)  # float32 logits
        assert report["validation_accuracy"] == pytest.approx(2 / 3)

    def test_half_precision_logits_are_summed_in_float32(self) -> None:
        """The cross-entropy of 4096 equal float16 rows is not rounded to float16's 3 digits."""
        context: Any = Context()
        metrics = ClassificationMetrics(context)
        logits = torch.zeros(4096, 10, dtype=torch.float16)
        metrics.add(logits, torch.zeros(4096, dtype=torch.int64))
        loss = metrics.cross_slot_reduce([metrics.per_slot_reduce()])["validation_loss"]
        assert loss == pytest.approx(math.log(10), rel=1e-6)


def test_peak_of_a_gpu_alone_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    forget_peak_memory(torch.device("cpu"))
    assert asked == []
    forget_peak_memory(torch.device("cuda"))
    assert asked == [torch.device("cuda")]


def test_stopwatch_runs_from_start_to_stop() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    assert stopwatch.seconds() == 0
    stopwatch.start()
    assert stopwatch.running
    assert stopwatch.seconds() > 0
    stopwatch.stop()
    assert stopwatch.seconds() == 0


class TestDeviceSum:
    @pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
    def test_is_the_weighted_sum_however_many_there_are(self, count: int) -> None:
        """Whole numbers: exact in float32 and in float64. The weight changes on the way."""
        values, weights = range(1, count + 1), [3 if n % 50 else 7 for n in range(count)]
        total = DeviceSum(torch.device("cpu"))
        for value, weight in zip(values, weights, strict=True):
            total.add(torch.tensor(float(value)), weight)
        expected = sum(v * w for v, w in zip(values, weights, strict=True))
        assert total.total().item() == expected
        assert total.total().item() == expected  # asking changes nothing
        assert total.total().dtype is torch.float64

    def test_is_added_up_in_double_precision(self) -> None:
        """2^24 + 1 is no float32."""
        total = DeviceSum(torch.device("cpu"))
        for value in (2.0**24, 1.0):
            total.add(torch.tensor(value))
        assert total.total().item() == 2**24 + 1

    def test_keeps_a_bounded_number_of_tensors(self) -> None:
        total = DeviceSum(torch.device("cpu"))
        values = [torch.ones(()) for _ in range(1000)]
        references = [weakref.ref(value) for value in values]
        while values:
            total.add(values.pop())
        assert sum(reference() is not None for reference in references) <= 64

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_leaves_out_what_is_not_finite_if_told_to(self, bad: float) -> None:
        finite, plain = (DeviceSum(torch.device("cpu"), finite_only=only) for only in (True, False))
        for value in (1.0, bad, 2.0):
            finite.add(torch.tensor(value))
            plain.add(torch.tensor(value))
        assert finite.total().item() == 3
        assert not math.isfinite(plain.total().item())

    def test_reset_forgets_what_waits_and_what_is_summed(self) -> None:
        total = DeviceSum(torch.device("cpu"))
        total.add(torch.tensor(1.0))
        total.total()
        total.add(torch.tensor(2.0))
        total.reset()
        total.add(torch.tensor(4.0))
        assert total.total().item() == 4
