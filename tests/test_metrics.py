"""What is reported is a mean over samples and a count of steps, read once per
report.
"""

import math
import resource
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from determined_amp.amp.loop import AmpLoop
from determined_amp.amp.metrics import (
    WARMUP_BATCHES,
    StepReport,
    forget_peak_memory,
    peak_memory_mib,
)
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.amp.throughput import Stopwatch
from determined_amp.trial.mixed_precision import MixedPrecision
from tests.harness import Context


def training_metrics(slots=1, precision=Precision.AMP_FP16):
    """The metrics of a trial."""
    context: Any = Context(slots)
    context.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    return MixedPrecision(context, AmpSettings(precision)).metrics


def gradients_of(metrics):
    """What is known of the one optimizer."""
    (gradients,) = metrics.windows.all()
    return gradients


def report_of(metrics):
    """What one slot alone reports."""
    return metrics.cross_slot_reduce([metrics.per_slot_reduce()])


# The loss scale of gradients that are measured as they are.
UNSCALED = partial(torch.ones, ())


def having(*gradients):
    """Parameters with these gradients."""
    made = []
    for gradient in gradients:
        made.append(nn.Parameter(torch.zeros_like(gradient)))
        made[-1].grad = gradient
    return made


def count_step(window, skipped):
    """Make a step of gradients that were unscaled, and end its batch."""
    window.begin_step()
    window.skipped = skipped
    for call in ("step", "update"):
        window.move(call)
    window.count()


class Clock:
    """A clock that stands where a test puts it; in seconds."""

    now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """The clock of the metrics."""
    made = Clock()
    monkeypatch.setattr("determined_amp.amp.throughput.time", made)
    return made


def warmed_up():
    """After the last batch that is not timed; what was waited for these does not
    count.
    """
    metrics = training_metrics()
    for _ in range(WARMUP_BATCHES):
        metrics.waited(1e9)
        metrics.add(torch.tensor(1.0), 8)
    return metrics


class TestTrainingMetrics:
    def test_sum_of_losses_keeps_no_graph(self):
        amp = AmpLoop(AmpSettings(Precision.FP32), "cpu")
        for samples in (1, 2):
            amp.update(torch.tensor(1.0, requires_grad=True), samples)
        losses = amp.metrics._loss_sum
        assert not any(waiting.requires_grad for waiting in losses._waiting)
        assert not losses.total().requires_grad

    def test_loss_of_a_batch_without_samples_is_not_in_the_mean(self):
        amp = AmpLoop(AmpSettings(Precision.AMP_BF16), "cpu")
        amp.update(torch.tensor(math.nan), samples=0)
        amp.update(torch.tensor(2.0), samples=8)
        assert amp.report()["loss"] == 2

    def test_speed_of_a_loop_leaves_out_what_follows_a_report(self, clock):
        amp = AmpLoop(AmpSettings(Precision.FP32), "cpu")

        def speed(batches):
            for _ in range(batches):
                amp.autocast()
                clock.now += 1.0
                amp.update(1.0, samples=8)
            return amp.report()["samples_per_second"]

        assert speed(WARMUP_BATCHES + 2) == 8
        clock.now += 100.0  # a validation
        assert speed(2) == 8

    def test_report_is_of_its_own_batches_alone(self):
        """A step with norm 2 and a gradient of 2^10; a skipped one and two of norm 6;
        then none.
        """
        metrics = training_metrics()
        gradients = gradients_of(metrics)
        gradients.move("unscale")
        gradients.measure(having(torch.full((1,), 2.0**10)), UNSCALED)
        gradients.add_norm(torch.tensor(2.0))
        count_step(gradients, torch.tensor(0.0))
        first = report_of(metrics)
        assert first["watch_grad_norm"] == 2
        assert first["watch_headroom_bits"] == pytest.approx(math.log2(65504) - 10)
        metrics.reset()
        gradients.counts.attempted = 0  # looked at on every tenth step
        gradients.measure(having(torch.full((1,), 2.0)), UNSCALED)
        gradients.counts.attempted = 1
        for norm, found_inf in ((math.inf, 1.0), (4.0, 0.0), (8.0, 0.0)):
            gradients.move("unscale")
            gradients.add_norm(torch.tensor(norm))
            count_step(gradients, torch.tensor(found_inf))
        second = report_of(metrics)
        assert second["watch_grad_norm"] == 6
        assert second["watch_skip_ratio"] == pytest.approx(1 / 3)
        assert second["watch_headroom_bits"] == pytest.approx(math.log2(65504) - 1)
        report = StepReport("", 3, 1, 0, new_applied=2, new_attempted=3, grad_norm=6.0)
        assert metrics.latest == [replace(report, largest_gradient=2.0)]
        metrics.reset()
        third = report_of(metrics)
        missing = {"watch_grad_norm", "watch_skip_ratio", "watch_headroom_bits", "loss"}
        assert missing.isdisjoint(third)
        assert (third["watch_applied_steps"], third["skipped_steps"]) == (3, 1)

    def test_counts_of_the_first_optimizer_can_be_read_before_it_exists(self):
        context: Any = Context()
        windows = MixedPrecision(context, AmpSettings(Precision.AMP_FP16)).windows
        before = windows.first_counts
        for _ in range(2):
            context.wrap_optimizer(
                torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
            )
        second, first = (windows[context.optimizers[index]].counts for index in (1, 0))
        assert first is before is windows.first_counts
        assert second is not before
        assert [window.counts for window in windows.all()] == [first, second]

    def test_speed_and_wait_are_those_of_each_report(self, clock):
        """16 samples in 4 s, 1 s of them waited; then 6 in 3 s; then nothing."""
        metrics = warmed_up()

        def reported(*batches):
            for clock.now, waited, samples in batches:
                if waited is not None:
                    metrics.waited(waited)
                metrics.add(torch.tensor(1.0), samples)
            report = report_of(metrics)
            metrics.reset()
            names = ("samples_per_second", "watch_data_wait_share")
            return report.get(names[0]), report.get(names[1])

        assert reported((1.0, 0.5, 8), (4.0, 0.5, 8)) == (4, 0.25)
        # a batch was asked for before the clock started
        assert reported((7.0, 3.5, 6)) == (2, 1)
        assert reported() == (None, None)
        assert reported((8.0, None, 3)) == (3, None)

    @pytest.mark.parametrize(
        ("waits", "share"), [((0.25, 0.5, 0.0), 0.5), ((None, 0.25, None), 0.25)]
    )
    def test_slots_add_up_their_speed_and_report_the_largest_of_all_else(
        self, waits, share
    ):
        slots = []
        for number, wait in enumerate(waits, start=1):
            metrics = training_metrics(slots=3)
            for _ in range(number % 3):
                gradients_of(metrics).counts.count(skipped=False)
            measured = {
                "samples_per_second": 10.0 * number,
                "watch_data_wait_share": wait,
                "watch_peak_memory_mib": 300.0 / number,
                "watch_peak_reserved_memory_mib": 500.0 * number,
            }
            slots.append({**metrics.per_slot_reduce(), **measured})
        report = metrics.cross_slot_reduce(slots)
        assert report["samples_per_second"] == 60
        assert report["watch_data_wait_share"] == share
        assert report["watch_peak_memory_mib"] == 300
        assert report["watch_peak_reserved_memory_mib"] == 1500
        assert (report["watch_applied_steps"], report["skipped_steps"]) == (2, 0)

    @pytest.mark.parametrize(
        ("slots", "loss"),
        [
            ([[(1.0, 3)], [(5.0, 1)]], 2.0),
            # without a number of samples it counts as one
            ([[(1.0, None), (4.0, 2)]], 3.0),
            ([[(None, 3)]], None),
            ([[]], None),
        ],
    )
    def test_loss_is_the_mean_over_the_samples_of_all_slots(self, slots, loss):
        """Without any loss, none is reported."""
        made = [training_metrics(len(slots)) for _ in slots]
        for metrics, batches in zip(made, slots, strict=True):
            for value, samples in batches:
                metrics.add(None if value is None else torch.tensor(value), samples)
        first, last = made[0], made[-1]
        last.once, first.once = {"audit": 0.5}, {"audit": 1.0}
        report = first.cross_slot_reduce(
            [metrics.per_slot_reduce() for metrics in made]
        )
        assert (report.get("loss"), report["audit"]) == (loss, 1.0)
        steps = [StepReport("", 0, 0, 0, 0, 0)]
        assert (first.latest, first.scale_of_newest_step) == (steps, 65536.0)
        assert first.loss == loss

    def test_peak_memory_is_that_of_training_batches_after_the_first_ones(
        self, monkeypatch
    ):
        """A GPU's counter holds the largest use since its reset: first 9, then 2 and 3.

        The 8 in between belongs to a validation.
        """
        counter = [0.0]
        monkeypatch.setattr(
            "determined_amp.amp.metrics.peak_memory_mib",
            lambda device: {"watch_peak_memory_mib": counter[0]},
        )
        monkeypatch.setattr(
            "determined_amp.amp.metrics.forget_peak_memory",
            lambda device: counter.__setitem__(0, 0.0),
        )
        metrics = training_metrics()

        def train(uses, batches):
            for _ in range(batches):
                counter[0] = max(counter[0], uses)
                metrics.add(torch.tensor(1.0), 8)
            counter[0] = max(counter[0], uses)
            return float(metrics.per_slot_reduce()["watch_peak_memory_mib"])

        assert train(9.0, WARMUP_BATCHES - 1) == 9.0
        metrics.add(torch.tensor(1.0), 8)
        assert train(2.0, 1) == 2.0
        metrics.reset()  # a validation begins
        counter[0] = 8.0
        metrics.reset()  # and has ended
        assert train(3.0, 1) == 3.0
        metrics.reset()
        assert train(1.0, 1) == 3.0

    @pytest.mark.parametrize(
        ("precision", "gradient"),
        [(Precision.AMP_FP16, 0.0), (Precision.AMP_BF16, 1.0)],
    )
    def test_headroom_of_zeros_or_without_a_loss_scale_is_not_reported(
        self, precision, gradient
    ):
        """Parameters without a number in their gradient have no headroom either."""
        metrics = training_metrics(precision=precision)
        sparse = torch.zeros(2, 2).to_sparse()
        parameters = having(torch.tensor([gradient]), sparse)
        gradients_of(metrics).measure(
            [nn.Parameter(torch.ones(1)), *parameters], UNSCALED
        )
        gradients_of(metrics).measure(parameters[1:], UNSCALED)
        assert "watch_headroom_bits" not in report_of(metrics)


def test_peak_memory_is_of_the_process_on_a_cpu_and_of_torchs_counters_on_a_gpu(
    monkeypatch,
):
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert peak_memory_mib(cpu) == {
        "watch_peak_memory_mib": pytest.approx(resident, 0.1)
    }
    for name, mib in (("allocated", 3), ("reserved", 5)):
        held = {gpu: mib * 2**20}
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", held.__getitem__)
    on_gpu = {"watch_peak_memory_mib": 3.0, "watch_peak_reserved_memory_mib": 5.0}
    assert peak_memory_mib(gpu) == on_gpu
    asked = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", asked.append)
    for device in (cpu, gpu):
        forget_peak_memory(device)
    assert asked == [gpu]


def test_stopwatch_of_a_gpu_reads_its_events(monkeypatch):
    """The events know when the device was there, once the later one has been waited
    for.
    """
    times = iter([2.0, 5.0])

    class Event:
        def __init__(self, *, enable_timing):
            self.is_timed, self.has_come = enable_timing, False

        def record(self):
            self.at = next(times)

        def synchronize(self):
            self.has_come = True

        def elapsed_time(self, later):
            assert self.is_timed
            assert later.has_come
            return 1000.0 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stopwatch = Stopwatch(torch.device("cuda"))
    stopwatch.start()
    assert stopwatch.seconds() == 3
