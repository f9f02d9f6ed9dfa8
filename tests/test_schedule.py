"""`amp.schedules`: the rate of every step, and that it follows the steps that were applied."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from determined_amp.amp.schedules import AppliedStepSchedule, LRSchedule, learning_rates

_CPU = torch.device("cpu")

# Of the peak: either side rounds an angle of at most pi twice, and a factor in [0, 1] twice, which
# is less than 4 epsilons (2**-52) each.
_TOLERANCE = 8 * 2.0**-52
_ROOT = math.sqrt(0.5)


def closed_form(schedule: LRSchedule, peak: float, warmup: int, total: int) -> list[float]:
    """cos(x / 2)^2 is (1 + cos x) / 2: the same curve, computed in another way."""
    step = np.arange(total, dtype=np.float64)
    angle = np.pi / 2 * np.clip((step - warmup) / max(total - warmup, 1), 0, None)
    after = np.cos(angle) ** 2 if schedule is LRSchedule.COSINE else np.ones(total)
    return list(peak * np.where(step < warmup, (step + 1) / (warmup + 1), after))


@pytest.mark.parametrize("schedule", LRSchedule)
@pytest.mark.parametrize(
    ("warmup", "total"), [(0, 1), (0, 2), (0, 500), (1, 500), (37, 500), (499, 500), (900, 500)]
)
def test_learning_rates_equal_the_closed_form(
    schedule: LRSchedule, warmup: int, total: int
) -> None:
    rates = learning_rates(schedule, 0.3, warmup, total)
    expected = closed_form(schedule, 0.3, warmup, total)
    assert rates == pytest.approx(expected, rel=0, abs=0.3 * _TOLERANCE)
    assert len(rates) == total
    assert max(rates) == (0.3 if total > warmup else pytest.approx(0.3 * 500 / 901))


def test_closed_form_tells_a_warmup_of_one_step_more() -> None:
    """Negative control: the tolerance is 5e-16, the deviation of the next schedule 1e-3."""
    rates = learning_rates(LRSchedule.COSINE, 0.3, 37, 500)
    assert np.abs(np.subtract(rates, closed_form(LRSchedule.COSINE, 0.3, 38, 500))).max() > 1e-3


@pytest.mark.parametrize(
    ("schedule", "peak", "warmup", "expected"),
    [
        (LRSchedule.CONSTANT, 8.0, 3, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]),
        (LRSchedule.CONSTANT, 8.0, 7, [1.0, 2.0, 3.0]),  # the run ends before the warm-up
        (LRSchedule.COSINE, 2.0, 0, [2.0, 1 + _ROOT, 1.0, 1 - _ROOT]),  # angles 0, 45, 90, 135
        (LRSchedule.COSINE, 2.0, 1, [1.0, 2.0, 1.5, 0.5]),  # angles 0, 60, 120 after the warm-up
        (LRSchedule.COSINE, 2.0, 0, [2.0]),
    ],
)
def test_learning_rates_of_a_short_run(
    schedule: LRSchedule, peak: float, warmup: int, expected: list[float]
) -> None:
    rates = learning_rates(schedule, peak, warmup, len(expected))
    assert rates == pytest.approx(expected, rel=0, abs=peak * _TOLERANCE)


def sgd_of_two_groups(lr: float, says_fused: bool = False) -> torch.optim.SGD:
    """Not every torch has a fused one for a CPU; the plain one takes a rate on the device too."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=lr)
    optimizer.defaults["fused"] = says_fused
    return optimizer


FUSED_OR_NOT = pytest.mark.parametrize(
    ("fused", "kind"), [(True, torch.Tensor), (False, float)], ids=["fused", "unfused"]
)


@FUSED_OR_NOT
def test_every_group_uses_exactly_the_rate_of_the_next_step(fused: bool, kind: type) -> None:
    rates = learning_rates(LRSchedule.COSINE, 0.3, 2, 7)
    optimizer = sgd_of_two_groups(99.0, fused)
    schedule = AppliedStepSchedule(optimizer, rates, _CPU)
    for applied in (0, 1, 1, 2, 6, 3):  # a skipped step applies none, a resume may go anywhere
        schedule.move_to(torch.tensor(applied))
        assert [float(group["lr"]) for group in optimizer.param_groups] == [rates[applied]] * 2
        assert {type(group["lr"]) for group in optimizer.param_groups} == {kind}


@FUSED_OR_NOT
def test_optimizer_steps_by_the_scheduled_rate(fused: bool, kind: type) -> None:
    """SGD on gradient 1 moves a weight by the rate; float32 weights make it the float32 rate."""
    rates = learning_rates(LRSchedule.COSINE, 0.3, 2, 7)
    optimizer = sgd_of_two_groups(99.0, fused)
    schedule = AppliedStepSchedule(optimizer, rates, _CPU)
    for applied, rate in enumerate(rates):
        schedule.move_to(torch.tensor(applied))
        for group in optimizer.param_groups:
            (weight,) = group["params"]
            weight.data.zero_()
            weight.grad = torch.ones(1)
        optimizer.step()
        for group in optimizer.param_groups:
            assert group["params"][0].item() == -np.float32(rate)


@FUSED_OR_NOT
@pytest.mark.parametrize("applied", [7, 8, 1000])
def test_schedule_stays_on_its_last_rate_past_the_end(
    applied: int, fused: bool, kind: type
) -> None:
    rates = learning_rates(LRSchedule.COSINE, 0.3, 2, 7)
    optimizer = sgd_of_two_groups(99.0, fused)
    AppliedStepSchedule(optimizer, rates, _CPU).move_to(torch.tensor(applied))
    assert [float(group["lr"]) for group in optimizer.param_groups] == [rates[6]] * 2


@pytest.mark.parametrize(
    "rates",
    [learning_rates(LRSchedule.CONSTANT, 0.3, 0, 5), learning_rates(LRSchedule.COSINE, 0.3, 0, 1)],
)
def test_constant_rate_stays_the_optimizers_own_float(rates: list[float]) -> None:
    optimizer = sgd_of_two_groups(lr=0.3)
    AppliedStepSchedule(optimizer, rates, _CPU).move_to(torch.tensor(3))
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]
    assert {type(group["lr"]) for group in optimizer.param_groups} == {float}
