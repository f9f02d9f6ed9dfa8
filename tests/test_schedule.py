"""`amp.schedules`: any torch scheduler moves with the steps that were applied, to the last bit."""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.schedules import AppliedStepSchedule, PlateauSchedule
from tests.fake_cuda import Syncs, fake_cuda, needs_fake_cuda

CPU = torch.device("cpu")
RATES = (0.3, 0.05)  # of the parameter groups
STEPS = 600  # more than two chunks of the simulation

MakeOptimizer = Callable[..., Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
# What a step uses: for every group, the values that schedulers move.
Used = list[dict[str, Any]]


def make_optimizer(
    kind: MakeOptimizer = torch.optim.SGD, groups: int = 2, says_fused: bool = False
) -> Optimizer:
    """Not every torch has a fused one for a CPU; the plain one takes a rate on the device too."""
    settings: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in RATES[:groups]],
        lr=99.0,
        **settings,
    )
    optimizer.defaults["fused"] = says_fused
    return optimizer


def warm_then_cosine(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.01, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=300),
        ],
        milestones=[5],
    )


def warm_and_decay(optimizer: Optimizer) -> LRScheduler:
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.99),
        ]
    )


def late(optimizer: Optimizer) -> LRScheduler:
    """Constant for a chunk of the simulation, and then not."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 300 else 0.5)


class OfLastRate(LRScheduler):
    """A user's own, which goes on from the rates that it answered last."""

    def get_lr(self) -> list[float | torch.Tensor]:
        rates = self._last_lr if self.last_epoch else self.base_lrs
        return [rate * 0.99 for rate in rates]


def own_functions(optimizer: Optimizer) -> LRScheduler:
    functions: list[Callable[[int], float]] = [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
    return lr_scheduler.LambdaLR(optimizer, functions[: len(optimizer.param_groups)])


def one_cycle(optimizer: Optimizer, cycle_momentum: bool = True) -> LRScheduler:
    peaks = [1.0, 0.7][: len(optimizer.param_groups)]
    return lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps=STEPS, cycle_momentum=cycle_momentum
    )


triangles = partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=7)
SCHEDULERS: dict[str, tuple[MakeOptimizer, MakeScheduler]] = {
    "step": (torch.optim.SGD, partial(lr_scheduler.StepLR, step_size=7)),
    "multi_step": (
        torch.optim.SGD,
        partial(lr_scheduler.MultiStepLR, milestones=[3, 4, 280], gamma=0.3),
    ),
    "exponential": (torch.optim.SGD, partial(lr_scheduler.ExponentialLR, gamma=0.97)),
    "lambda": (torch.optim.SGD, own_functions),
    "multiplicative": (
        torch.optim.SGD,
        partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 1 - 1 / (step + 2)),
    ),
    "one_cycle": (torch.optim.SGD, one_cycle),
    "one_cycle_of_betas": (torch.optim.Adam, one_cycle),
    "one_cycle_of_the_rate": (torch.optim.Adam, partial(one_cycle, cycle_momentum=False)),
    "cyclic": (torch.optim.SGD, triangles),
    "cyclic_by_step": (torch.optim.SGD, partial(triangles, mode="exp_range", gamma=0.99)),
    "cyclic_of_betas": (torch.optim.Adam, triangles),
    "cyclic_of_the_rate": (torch.optim.Adam, partial(triangles, cycle_momentum=False)),
    "cosine": (torch.optim.SGD, partial(lr_scheduler.CosineAnnealingLR, T_max=50, eta_min=0.01)),
    "restarts": (
        torch.optim.SGD,
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5, T_mult=2),
    ),
    "sequential": (torch.optim.SGD, warm_then_cosine),
    "chained": (torch.optim.SGD, warm_and_decay),
    "polynomial": (torch.optim.SGD, partial(lr_scheduler.PolynomialLR, total_iters=90, power=0.9)),
    "linear": (torch.optim.SGD, partial(lr_scheduler.LinearLR, total_iters=30)),
    "late": (torch.optim.SGD, late),
    "of_last_rate": (torch.optim.SGD, OfLastRate),
}
EVERY_SCHEDULER = pytest.mark.parametrize(
    ("kind", "make_scheduler"), SCHEDULERS.values(), ids=SCHEDULERS
)
FUSED_OR_NOT = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])


def is_skipped(attempt: int) -> bool:
    """The first steps, single ones, and some in a row."""
    return attempt < 2 or attempt % 5 == 0 or attempt % 50 < 3


def used_by(optimizer: Optimizer) -> Used:
    """What the next step uses."""
    return [
        {key: group[key] for key in ("momentum", "betas") if key in group}
        | {"lr": float(group["lr"])}
        for group in optimizer.param_groups
    ]


def plain(optimizer: Optimizer, scheduler: LRScheduler, steps: int) -> list[Used]:
    """What torch's own loop without skipped steps uses."""
    used = []
    for _ in range(steps):
        used.append(used_by(optimizer))
        optimizer.step()
        scheduler.step()
    return used


def followed(
    schedule: AppliedStepSchedule, attempted: int, applied: int, steps: int
) -> Iterator[tuple[int, int, Used]]:
    """Attempted and applied steps so far, and what the next one uses."""
    on_device = torch.tensor(applied)
    schedule.move(attempted, on_device)
    for attempt in range(attempted, attempted + steps):
        yield attempt, int(on_device), used_by(schedule.optimizer)
        on_device.add_(not is_skipped(attempt))
        schedule.move(attempt + 1, on_device)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.3's SequentialLR warns of torch
@EVERY_SCHEDULER
@FUSED_OR_NOT
def test_every_step_uses_what_torchs_own_loop_of_the_applied_steps_uses(
    kind: MakeOptimizer, make_scheduler: MakeScheduler, fused: bool
) -> None:
    optimizer = make_optimizer(kind)
    expected = plain(optimizer, make_scheduler(optimizer), STEPS)
    optimizer = make_optimizer(kind, says_fused=fused)
    scheduler = make_scheduler(optimizer)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    for attempted, applied, used in followed(schedule, 0, 0, STEPS):
        # Whatever a fused optimizer cannot read from the device follows attempted steps.
        others = expected[attempted if fused else applied]
        rates = [{"lr": values["lr"]} for values in expected[applied]]
        assert used == [values | rate for values, rate in zip(others, rates, strict=True)]
    assert applied < attempted - 100


def test_rates_that_stay_take_no_memory_and_are_right_when_they_move_again() -> None:
    """A warm-up, then 3000 steps at one rate, then another."""
    rate = {0: 0.25, 3000: 0.5}

    def factor(step: int) -> float:
        return rate.get(step // 3000 * 3000, 0.125) if step > 1 else 1.0

    optimizer = make_optimizer(groups=1, says_fused=True)
    schedule = AppliedStepSchedule(lr_scheduler.LambdaLR(optimizer, factor), CPU, skips=True)
    used = {}
    for step in (0, 1, 2, 2500, 2999, 3000, 3500):
        schedule.move(step, torch.tensor(step))
        used[step] = float(optimizer.param_groups[0]["lr"]) / RATES[0]
        if step == 2500:
            assert schedule._table is not None
            assert len(schedule._table._table) < 300
    assert used == {0: 1.0, 1: 1.0, 2: 0.25, 2500: 0.25, 2999: 0.25, 3000: 0.5, 3500: 0.5}


@EVERY_SCHEDULER
def test_schedule_by_attempted_steps_would_differ(
    kind: MakeOptimizer, make_scheduler: MakeScheduler
) -> None:
    """Negative control of the comparison above: `skips=False` counts attempted steps."""
    schedules = [
        AppliedStepSchedule(make_scheduler(make_optimizer(kind)), CPU, skips=skips)
        for skips in (True, False)
    ]
    runs = [followed(schedule, 0, 0, STEPS) for schedule in schedules]
    assert any(one != other for one, other in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@EVERY_SCHEDULER
@FUSED_OR_NOT
def test_without_skips_every_optimizer_keeps_plain_numbers(
    kind: MakeOptimizer, make_scheduler: MakeScheduler, fused: bool
) -> None:
    optimizer = make_optimizer(kind)
    expected = plain(optimizer, make_scheduler(optimizer), 300)
    optimizer = make_optimizer(kind, says_fused=fused)
    schedule = AppliedStepSchedule(make_scheduler(optimizer), CPU, skips=False)
    for attempted in range(300):
        schedule.move(attempted, torch.tensor(attempted))
        assert used_by(optimizer) == expected[attempted]
        assert {type(group["lr"]) for group in optimizer.param_groups} == {float}


def spoil(optimizer: Optimizer) -> None:
    """What a checkpoint with other values leaves in every group."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for key in ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"):
            if key in group:
                group[key] = 77.0
        if "betas" in group:
            group["betas"] = (0.5, 0.5)
        if "momentum" in group:
            group["momentum"] = 0.5
    optimizer.load_state_dict(state)


def moving(runs: list[tuple[int, int, Used]], keys: set[str]) -> list[Any]:
    return [[{key: it[key] for key in keys} for it in used] for _, _, used in runs]


@EVERY_SCHEDULER
@FUSED_OR_NOT
def test_resume_at_any_step_goes_on_exactly(
    kind: MakeOptimizer, make_scheduler: MakeScheduler, fused: bool
) -> None:
    def schedule() -> AppliedStepSchedule:
        optimizer = make_optimizer(kind, says_fused=fused)
        return AppliedStepSchedule(make_scheduler(optimizer), CPU, skips=True)

    undisturbed = list(followed(schedule(), 0, 0, 300))
    # What the scheduler leaves alone is the checkpoint's.
    first = undisturbed[0][2][0]
    keys = {key for key in first if any(it[2][0][key] != first[key] for it in undisturbed)}
    for attempted, applied, _ in [*undisturbed[:6], undisturbed[11], *undisturbed[255:258]]:
        resumed = schedule()
        spoil(resumed.optimizer)
        continued = list(followed(resumed, attempted, applied, 20))
        expected = undisturbed[attempted : attempted + 20]
        assert [run[:2] for run in continued] == [run[:2] for run in expected]
        assert moving(continued, keys) == moving(expected, keys)


@FUSED_OR_NOT
@pytest.mark.parametrize("attempted", [12, 13, 700])
def test_schedule_stays_on_its_last_values_past_the_end_and_says_so_once(
    attempted: int, fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=10)
    optimizer = make_optimizer(groups=1)
    scheduler = make(optimizer)
    plain(optimizer, scheduler, 10)  # it can be stepped once more than the 9 times of 10 steps
    expected = used_by(optimizer)
    optimizer = make_optimizer(groups=1, says_fused=fused)
    schedule = AppliedStepSchedule(make(optimizer), CPU, skips=True)

    def ends() -> list[str]:
        return [line for line in caplog.messages if "ends after" in line]

    for step in (10, 11):
        schedule.move(step, torch.tensor(step))
        assert used_by(optimizer) == expected
    assert ends() == []  # step 11 has not been taken
    for step in (attempted, attempted + 1):
        schedule.move(step, torch.tensor(step))
        assert used_by(optimizer) == expected
    assert ends() == [
        "OneCycleLR ends after 11 steps (ValueError: Tried to step 11 times. The specified number "
        "of total steps is 10); later steps keep its last values"
    ]


@pytest.mark.parametrize(
    "factor", [lambda step: [1.0, 0.5, 0.25][step], lambda step: (1 - step / 2) ** 0.9]
)
def test_lambdas_that_only_know_the_run_are_right_to_its_end(
    factor: Callable[[int], float], caplog: pytest.LogCaptureFixture
) -> None:
    """The list has no more, and a negative number to the power of 0.9 is complex."""
    optimizer = make_optimizer(groups=1)
    schedule = AppliedStepSchedule(lr_scheduler.LambdaLR(optimizer, factor), CPU, skips=False)
    for step in (0, 1, 2, 3):
        schedule.move(step, torch.tensor(step))
        assert used_by(optimizer)[0]["lr"] == 0.3 * factor(min(step, 2))
    assert caplog.messages == []  # the run had three steps
    schedule.move(4, torch.tensor(4))
    assert len(caplog.messages) == 1


@FUSED_OR_NOT
def test_scheduler_that_raises_at_its_first_step_is_an_error_with_its_own_text(fused: bool) -> None:
    def forgets_a_name(step: int) -> float:
        return factor if step else 1.0  # type: ignore[name-defined]  # noqa: F821

    optimizer = make_optimizer(groups=1, says_fused=fused)
    scheduler = lr_scheduler.LambdaLR(optimizer, forgets_a_name)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    with pytest.raises(
        ConfigError,
        match=r"^wrap_lr_scheduler: LambdaLR raised at its first step: NameError: name 'fa",
    ):
        schedule.move(0, torch.tensor(0))


@FUSED_OR_NOT
@pytest.mark.parametrize("held", [2, 300])
def test_scheduler_that_holds_its_rate_and_then_raises_says_so(
    held: int, fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A table that is too short; constant until its end."""
    optimizer = make_optimizer(groups=1, says_fused=fused)
    table = [1.0] * held
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: table[step])
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    for step in range(held + 1):
        schedule.move(step, torch.tensor(step))
    assert caplog.messages == []
    for step in (held + 1, held + 2):
        schedule.move(step, torch.tensor(step))
    (said,) = caplog.messages
    assert said.startswith(f"LambdaLR ends after {held} steps (IndexError: list index")


@pytest.mark.parametrize(
    ("fused_and_skips", "make", "lines"),
    [
        ((True, True), one_cycle, 1),
        ((True, False), one_cycle, 0),
        ((False, True), one_cycle, 0),
        ((True, True), partial(one_cycle, cycle_momentum=False), 0),
    ],
)
@pytest.mark.parametrize(
    "optimizer_and_key", [(torch.optim.SGD, "momentum"), (torch.optim.Adam, "betas")]
)
def test_log_says_once_what_of_a_fused_optimizer_follows_attempted_steps(
    optimizer_and_key: tuple[MakeOptimizer, str],
    fused_and_skips: tuple[bool, bool],
    make: MakeScheduler,
    lines: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind, key = optimizer_and_key
    fused, skips = fused_and_skips
    schedule = AppliedStepSchedule(make(make_optimizer(kind, says_fused=fused)), CPU, skips=skips)
    list(followed(schedule, 0, 0, STEPS - 1))
    line = (
        f"OneCycleLR moves {key} of a fused optimizer, which must be known on the host: they "
        "follow attempted steps, skipped ones included; the learning rate follows applied steps"
    )
    assert caplog.messages == [line] * lines
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}


@FUSED_OR_NOT
def test_get_last_lr_answers_the_rates_in_use_while_the_simulation_is_ahead(fused: bool) -> None:
    scheduler = lr_scheduler.ExponentialLR(make_optimizer(says_fused=fused), 0.5)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    for attempted, applied in [(0, 0), (1, 0), (2, 1), (3, 2)]:
        schedule.move(attempted, torch.tensor(applied))
        assert [float(lr) for lr in scheduler.get_last_lr()] == [lr * 0.5**applied for lr in RATES]
    assert scheduler.last_epoch > 200


@pytest.mark.parametrize("make_scheduler", [late, warm_then_cosine])
def test_simulation_hides_torchs_warnings_of_its_own_use_and_no_others(
    make_scheduler: MakeScheduler,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.3 warns of its own SequentialLR
        scheduler = make_scheduler(make_optimizer())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        AppliedStepSchedule(scheduler, CPU, skips=True).move(0, torch.tensor(0))
    assert seen == []
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        late(make_optimizer()).step()


def test_warning_of_a_users_own_function_is_seen() -> None:
    def factor(step: int) -> float:
        warnings.warn("of the user", stacklevel=1)
        return 0.5

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        scheduler = lr_scheduler.LambdaLR(make_optimizer(), factor)
        before = len(seen)
        AppliedStepSchedule(scheduler, CPU, skips=True).move(0, torch.tensor(0))
    assert {str(warning.message) for warning in seen[before:]} == {"of the user"}


def test_scheduler_that_was_stepped_before_goes_on_from_there() -> None:
    optimizer = make_optimizer(groups=1)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    rates = [used[0]["lr"] for _, _, used in followed(schedule, 5, 0, 4)]
    assert rates == [0.15, 0.15, 0.075, 0.075]  # attempt 5 is a skipped one


def load_own_state(scheduler: LRScheduler) -> None:
    scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": [1.0, 2.0]})


@pytest.mark.parametrize("meddle", [LRScheduler.step, load_own_state])
def test_scheduler_that_others_step_or_load_too_is_an_error(
    meddle: Callable[[LRScheduler], None],
) -> None:
    optimizer = make_optimizer()
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    for step in range(2):
        schedule.move(step, torch.tensor(step))
        optimizer.step()
    meddle(scheduler)
    words = r"^wrap_lr_scheduler: StepLR was stepped, or its state loaded, outside"
    with pytest.raises(ConfigError, match=words):
        schedule.move(2, torch.tensor(2))


def test_scheduler_that_the_training_steps_is_an_error() -> None:
    scheduler = lr_scheduler.StepLR(make_optimizer(), 2)
    AppliedStepSchedule(scheduler, CPU, skips=True)
    with pytest.raises(ConfigError, match=r"^wrap_lr_scheduler: leave StepLR\.step\(\) to Mixed"):
        scheduler.step()


@FUSED_OR_NOT
def test_group_that_comes_later_keeps_its_own_rate(fused: bool) -> None:
    optimizer = make_optimizer(says_fused=fused)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    schedule.move(0, torch.tensor(0))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 7.0})
    schedule.move(1, torch.tensor(1))
    assert [values["lr"] for values in used_by(optimizer)] == [0.15, 0.025, 7.0]


def test_resume_where_no_step_can_be_skipped_goes_on_after_those_that_were() -> None:
    optimizer = make_optimizer(groups=1)
    schedule = AppliedStepSchedule(lr_scheduler.StepLR(optimizer, 1, 0.5), CPU, skips=False)
    for attempted, applied in ((5, 3), (6, 4)):
        schedule.move(attempted, applied)
        assert optimizer.param_groups[0]["lr"] == 0.3 * 0.5**applied


def test_plateau_scheduler_is_no_schedule_of_steps() -> None:
    plateau = lr_scheduler.ReduceLROnPlateau(make_optimizer())
    with pytest.raises(TypeError, match="use PlateauSchedule"):
        AppliedStepSchedule(plateau, CPU, skips=True)


def test_rate_that_is_a_tensor_of_the_host_is_followed_by_its_value() -> None:
    rate = torch.tensor(0.5)  # float32
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = AppliedStepSchedule(lr_scheduler.StepLR(optimizer, 1, 0.5), CPU, skips=True)
    for step in range(3):
        schedule.move(step, torch.tensor(step))
        assert float(optimizer.param_groups[0]["lr"]) == 0.5 * 0.5**step
    assert rate.item() == 0.5


# Without a GPU


@contextmanager
def on_fake_cuda(
    make_scheduler: MakeScheduler, *, fused: bool, skips: bool
) -> Iterator[tuple[Syncs, AppliedStepSchedule]]:
    with fake_cuda() as syncs:
        weights = [nn.Parameter(torch.zeros(1, device="cuda")) for _ in RATES]
        groups = [{"params": [it], "lr": lr} for it, lr in zip(weights, RATES, strict=True)]
        optimizer = torch.optim.Adam(groups, fused=fused)
        scheduler = make_scheduler(optimizer)
        yield syncs, AppliedStepSchedule(scheduler, torch.device("cuda"), skips=skips)


def run_on_fake_cuda(syncs: Syncs, schedule: AppliedStepSchedule) -> None:
    applied = torch.zeros((), dtype=torch.int64, device="cuda")
    schedule.move(0, applied)
    with syncs.during("steps"):
        for attempted in range(1, STEPS + 1):
            schedule.move(attempted, applied)


@needs_fake_cuda
def test_fused_step_is_two_kernels_and_waits_for_nothing() -> None:
    with on_fake_cuda(one_cycle, fused=True, skips=True) as (syncs, schedule):
        run_on_fake_cuda(syncs, schedule)
        groups = schedule.optimizer.param_groups
        assert {(it["lr"].dtype, it["lr"].device.type, it["lr"].dim()) for it in groups} == {
            (torch.float32, "cuda", 0)
        }
        # A transfer of a chunk does not wait: see the next test for one that would.
        assert syncs.waits["steps"] == {}
        calls = syncs.calls["steps"]
        assert (calls["clamp"], calls["index_select"], calls["cat"]) == (STEPS, STEPS, 2)


@needs_fake_cuda
def test_chunk_from_memory_that_is_not_pinned_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    with on_fake_cuda(one_cycle, fused=True, skips=True) as (syncs, schedule):
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
        run_on_fake_cuda(syncs, schedule)
        assert syncs.waits["steps"] == {"copy": 2}


@needs_fake_cuda
def test_unfused_step_reads_once_where_steps_can_be_skipped() -> None:
    with on_fake_cuda(one_cycle, fused=False, skips=True) as (syncs, schedule):
        run_on_fake_cuda(syncs, schedule)
        chunks = 2  # a chunk reads once more
        assert syncs.waits["steps"] == {"read": STEPS + chunks}


@needs_fake_cuda
@FUSED_OR_NOT
def test_nothing_is_asked_of_the_device_where_no_step_can_be_skipped(fused: bool) -> None:
    with on_fake_cuda(one_cycle, fused=fused, skips=False) as (syncs, schedule):
        run_on_fake_cuda(syncs, schedule)
        assert not syncs.calls["steps"]


@needs_fake_cuda
@FUSED_OR_NOT
@pytest.mark.parametrize("skips", [True, False])
def test_constant_schedule_never_uses_the_device_and_keeps_the_optimizers_number(
    fused: bool, skips: bool
) -> None:
    def constant(optimizer: Optimizer) -> LRScheduler:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    with on_fake_cuda(constant, fused=fused, skips=skips) as (syncs, schedule):
        run_on_fake_cuda(syncs, schedule)
        assert not syncs.calls["steps"]
        assert [group["lr"] for group in schedule.optimizer.param_groups] == [*RATES]


@needs_fake_cuda
def test_rate_that_is_already_on_the_device_is_refused() -> None:
    with fake_cuda():
        weight = nn.Parameter(torch.zeros(1, device="cuda"))
        rate = torch.tensor(0.1, device="cuda")
        scheduler = lr_scheduler.StepLR(torch.optim.Adam([weight], lr=rate, fused=True), 2)
        words = r"^wrap_lr_scheduler: lr of .* group 0 is a tensor on cuda.*allowed: a number"
        with pytest.raises(ConfigError, match=words):
            AppliedStepSchedule(scheduler, torch.device("cuda"), skips=True)


# By validations


def plateau(optimizer: Optimizer, **settings: Any) -> PlateauSchedule:
    settings = {"patience": 1, "cooldown": 1, "factor": 0.5, **settings}
    return PlateauSchedule(lr_scheduler.ReduceLROnPlateau(optimizer, **settings))


METRICS = (5.0, 4.0, 4.0, 4.5, 4.0, 3.0, 3.5, 3.5, 3.5, 3.6, 3.7, 3.8)


def rates_after(schedule: PlateauSchedule, metrics: tuple[float, ...]) -> list[list[float]]:
    rates = []
    for metric in metrics:
        schedule.validated(metric)
        rates.append([group["lr"] for group in schedule.optimizer.param_groups])
    return rates


def test_plateau_goes_on_exactly_after_every_validation() -> None:
    undisturbed = rates_after(plateau(make_optimizer()), METRICS)
    assert len({tuple(rates) for rates in undisturbed}) > 2
    for validated in range(len(METRICS)):
        first = plateau(make_optimizer())
        rates_after(first, METRICS[:validated])
        saved = io.BytesIO()
        torch.save(first.state_dict(), saved)
        saved.seek(0)
        second = plateau(make_optimizer())
        second.optimizer.load_state_dict(first.optimizer.state_dict())  # as Determined does
        second.load_state_dict(torch.load(saved, weights_only=True))
        assert second.state_dict() == first.state_dict()
        assert second._scheduler.get_last_lr() == first._scheduler.get_last_lr()
        assert rates_after(second, METRICS[validated:]) == undisturbed[validated:]


def test_plateau_without_its_state_goes_on_differently() -> None:
    """Negative control of the test above."""
    undisturbed = rates_after(plateau(make_optimizer()), METRICS)
    assert rates_after(plateau(make_optimizer()), METRICS[4:]) != undisturbed[4:]


def test_state_of_a_plateau_is_of_plain_types_and_settings_stay_the_trials() -> None:
    schedule = plateau(make_optimizer())
    assert schedule.state_dict() == {
        "best": math.inf,
        "num_bad_epochs": 0,
        "cooldown_counter": 0,
        "last_epoch": 0,
    }
    other = plateau(make_optimizer(), factor=0.1, patience=0)
    other.load_state_dict(schedule.state_dict())
    assert rates_after(other, (1.0, 1.0))[-1] == [lr * 0.1 for lr in RATES]


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_metric_that_is_not_finite_does_not_move_a_plateau_and_is_said(
    metric: float, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = plateau(make_optimizer())
    before = schedule.state_dict()
    schedule.validated(metric)
    assert schedule.state_dict() == before
    assert caplog.messages == [f"ReduceLROnPlateau ignores a validation metric of {metric}"]
