"""Any torch scheduler moves with the steps that were applied, and resumes, to the last
bit.
"""

import math
import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from determined_amp.amp.errors import ConfigError
from determined_amp.amp.schedules import AppliedStepSchedule, PlateauSchedule
from determined_amp.amp.torch_private import give_found_inf
from tests.trials import Modes, run_of

CPU = torch.device("cpu")
RATES = (0.3, 0.05)  # of the parameter groups
STEPS = 300  # more than a scheduler runs ahead at once


def make_optimizer(kind=SGD, groups=2, says_fused=False):
    """Not every torch has a fused one for a CPU; the plain one takes a rate on the
    device too.
    """
    settings = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in RATES[:groups]],
        lr=99.0,
        **settings,
    )
    if says_fused:
        give_found_inf(optimizer)
    return optimizer


def warm_then_cosine(optimizer):
    return lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.01, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=300),
        ],
        milestones=[5],
    )


def warm_and_decay(optimizer):
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.99),
        ]
    )


def late(optimizer):
    """Constant for as long as it runs ahead at once, and then not."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 270 else 0.5)


class OfLastRate(LRScheduler):
    """A user's own, which goes on from the rates that it answered last."""

    def get_lr(self):
        rates = self._last_lr if self.last_epoch else self.base_lrs
        return [rate * 0.99 for rate in rates]


class OfItsOwnStep(LRScheduler):
    """A user's own, whose `step` sets the rates itself and tells torch nothing."""

    def get_lr(self):
        return [rate * 0.99**self.last_epoch for rate in self.base_lrs]

    def step(self, epoch=None):
        self.last_epoch += 1
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, self.get_lr(), strict=True):
            group["lr"] = rate


def own_functions(optimizer):
    functions = [
        lambda step: 0.9**step,
        lambda step: 1 / (1 + step),
    ]
    return lr_scheduler.LambdaLR(optimizer, functions[: len(optimizer.param_groups)])


def one_cycle(optimizer, cycle_momentum=True):
    peaks = [1.0, 0.7][: len(optimizer.param_groups)]
    return lr_scheduler.OneCycleLR(
        optimizer, peaks, total_steps=STEPS, cycle_momentum=cycle_momentum
    )


halving = partial(lr_scheduler.StepLR, step_size=1, gamma=0.5)
multiplicative = partial(
    lr_scheduler.MultiplicativeLR, lr_lambda=lambda step: 1 - 1 / (step + 2)
)
cosine = partial(lr_scheduler.CosineAnnealingLR, T_max=50, eta_min=0.01)
restarts = partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=5, T_mult=2)
triangles = partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=7)
SCHEDULERS = {
    "lambda": (SGD, own_functions),
    "multiplicative": (SGD, multiplicative),
    "one_cycle": (SGD, one_cycle),
    "one_cycle_of_betas": (Adam, one_cycle),
    "cyclic": (SGD, triangles),
    "cosine": (SGD, cosine),
    "restarts": (SGD, restarts),
    "sequential": (SGD, warm_then_cosine),
    "chained": (SGD, warm_and_decay),
    "late": (SGD, late),
    "of_last_rate": (SGD, OfLastRate),
    "of_its_own_step": (SGD, OfItsOwnStep),
}
EVERY_SCHEDULER = pytest.mark.parametrize(
    ("kind", "make_scheduler"), SCHEDULERS.values(), ids=SCHEDULERS
)
FUSED_OR_NOT = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])


def scheduled(make_scheduler, kind=SGD, *, groups=2, fused=False, skips=True):
    """The schedule of an optimizer of its own."""
    optimizer = make_optimizer(kind, groups, says_fused=fused)
    return AppliedStepSchedule(make_scheduler(optimizer), CPU, skips=skips)


def move(schedule, *steps):
    """The rate of the first group after each of these steps, of which none was
    skipped.
    """
    rates = []
    for step in steps:
        schedule.move(step, torch.tensor(step))
        rates.append(used_by(schedule.optimizer)[0]["lr"])
    return rates


def is_skipped(attempt):
    """The first steps, single ones, and some in a row."""
    return attempt < 2 or attempt % 5 == 0 or attempt % 50 < 3


def used_by(optimizer):
    """What the next step uses."""
    return [
        {key: group[key] for key in ("momentum", "betas") if key in group}
        | {"lr": float(group["lr"])}
        for group in optimizer.param_groups
    ]


def plain(optimizer, scheduler, steps):
    """What torch's own loop without skipped steps uses."""
    used = []
    for _ in range(steps):
        used.append(used_by(optimizer))
        optimizer.step()
        scheduler.step()
    return used


def followed(schedule):
    """Attempted and applied steps so far, and what the next one uses."""
    on_device = torch.tensor(0)
    schedule.move(0, on_device)
    for attempt in range(STEPS - 1):
        yield attempt, int(on_device), used_by(schedule.optimizer)
        on_device.add_(not is_skipped(attempt))
        schedule.move(attempt + 1, on_device)


def right(expected, attempted, applied, fused):
    """What a step uses; `expected` is torch's own loop without skipped steps.

    Whatever a fused optimizer cannot read from the device follows attempted steps.
    """
    others = expected[attempted if fused else applied]
    rates = [{"lr": values["lr"]} for values in expected[applied]]
    return [values | rate for values, rate in zip(others, rates, strict=True)]


@EVERY_SCHEDULER
@FUSED_OR_NOT
def test_rate_of_every_step_is_that_of_torchs_own_loop_over_the_applied_steps(
    kind, make_scheduler, fused
):
    optimizer = make_optimizer(kind)
    expected = plain(optimizer, make_scheduler(optimizer), STEPS)
    scheduler = make_scheduler(make_optimizer(kind, says_fused=fused))
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    follows_attempted = []
    for attempted, applied, used in followed(schedule):
        assert used == right(expected, attempted, applied, fused)
        rates = [float(rate) for rate in scheduler.get_last_lr()]
        assert rates == [values["lr"] for values in used]
        follows_attempted.append(used == expected[attempted])
    assert applied < attempted - 50
    assert not all(follows_attempted)  # one that counts skipped steps would be seen

    schedule = scheduled(make_scheduler, kind, fused=fused, skips=False)
    for attempted in (0, 1, 2, STEPS - 1):
        schedule.move(attempted, torch.tensor(attempted))
        assert used_by(schedule.optimizer) == expected[attempted]
        assert type(schedule.optimizer.param_groups[0]["lr"]) is float


def spoil(optimizer):
    """What a checkpoint with other values leaves in every group."""
    rates = ("lr", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
    others = {**dict.fromkeys(rates, 77.0), "betas": (0.5, 0.5), "momentum": 0.5}
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.update({key: others[key] for key in others.keys() & group.keys()})
    optimizer.load_state_dict(state)


def only(keys, used):
    return [{key: values[key] for key in keys} for values in used]


@EVERY_SCHEDULER
@FUSED_OR_NOT
@pytest.mark.parametrize("skips", [True, False], ids=["float16", "no skips"])
def test_resume_at_any_step_has_the_rates_of_an_undisturbed_run(
    kind, make_scheduler, fused, skips
):
    """Steps may have been skipped before it in a precision in which none is now."""
    optimizer = make_optimizer(kind)
    expected = plain(optimizer, make_scheduler(optimizer), STEPS)
    first = expected[0][0]
    moved = {key for key in first if any(it[0][key] != first[key] for it in expected)}
    for attempted, applied in ((1, 0), (12, 7), (280, 257)):
        resumed = scheduled(make_scheduler, kind, fused=fused, skips=skips)
        spoil(resumed.optimizer)
        for step in range(2):
            counts = attempted + step, applied + step
            resumed.move(counts[0], torch.tensor(counts[1]))
            used = right(expected, *counts, fused and skips)
            assert only(moved, used_by(resumed.optimizer)) == only(moved, used)


def table(*factors):
    return partial(lr_scheduler.LambdaLR, lr_lambda=factors.__getitem__)


# A scheduler that raises, and the steps that it knows.
ENDS = {
    "a table": (table(1.0, 0.5, 0.25), 3),
    # A negative number to this power is complex.
    "a root": (
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: (1 - step / 2) ** 0.9),
        3,
    ),
    "a constant table": (table(1.0, 1.0), 2),
    "a long constant table": (table(*[1.0] * 300), 300),
}


@FUSED_OR_NOT
@pytest.mark.parametrize(
    "later", [0, 700], ids=["right after its end", "long after its end"]
)
@pytest.mark.parametrize("name", ENDS)
def test_schedule_keeps_its_last_values_after_its_end_and_says_so_once(
    name, later, fused, caplog
):
    make, known = ENDS[name]
    optimizer = make_optimizer(groups=1)
    plain(optimizer, make(optimizer), known - 1)
    last = used_by(optimizer)
    schedule = scheduled(make, groups=1, fused=fused)
    for step in (known - 1, known):
        move(schedule, step)
        assert used_by(schedule.optimizer) == last
    assert "ends after" not in caplog.text  # the step after these has not been taken
    for step in (known + 1 + later, known + 2 + later):
        move(schedule, step)
        assert used_by(schedule.optimizer) == last
    (said,) = (line for line in caplog.messages if "ends after" in line)
    assert re.match(
        rf"\w+LR ends after {known} steps \(\w+: .*\); later steps keep its last", said
    )


@FUSED_OR_NOT
def test_scheduler_that_raises_at_its_first_step_is_an_error_with_its_own_text(fused):
    def forgets_a_name(step):
        return factor if step else 1.0  # type: ignore[name-defined]  # noqa: F821

    schedule = scheduled(
        partial(lr_scheduler.LambdaLR, lr_lambda=forgets_a_name), fused=fused
    )
    words = (
        r"^wrap_lr_scheduler: LambdaLR raised at its first step: NameError: name 'fa"
    )
    with pytest.raises(ConfigError, match=words):
        move(schedule, 0)


@pytest.mark.parametrize(
    ("kind", "fused", "skips", "cycles", "moved"),
    [
        (SGD, True, True, True, ["momentum"]),
        (Adam, True, True, True, ["betas"]),
        (SGD, True, True, False, []),
        (SGD, True, False, True, []),
        (SGD, False, True, True, []),
    ],
    ids=["momentum", "betas", "only the rate moves", "nothing is skipped", "unfused"],
)
def test_log_warns_once_of_what_follows_attempted_steps_in_a_fused_optimizer(
    *, kind, fused, skips, cycles, moved, caplog
):
    make = partial(one_cycle, cycle_momentum=cycles)
    list(followed(scheduled(make, kind, fused=fused, skips=skips)))
    said = [line.partition(" of a fused optim")[0] for line in caplog.messages]
    assert said == [f"OneCycleLR moves {key}" for key in moved]


@pytest.mark.parametrize("make_scheduler", [late, warm_then_cosine])
def test_scheduler_that_runs_ahead_hides_torchs_warnings_of_that_and_no_others(
    make_scheduler,
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.3 warns of its own SequentialLR
        scheduler = make_scheduler(make_optimizer())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        AppliedStepSchedule(scheduler, CPU, skips=True).move(0, torch.tensor(0))
    assert seen == []
    with pytest.warns(UserWarning, match=r"before `optimizer\.step\(\)`"):
        late(make_optimizer()).step()


def test_scheduler_that_was_stepped_before_goes_on_from_there():
    optimizer = make_optimizer(groups=1)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    assert move(schedule, 0, 1, 2) == [0.15, 0.075, 0.075]


def load_own_state(scheduler):
    scheduler.load_state_dict({**scheduler.state_dict(), "_last_lr": [1.0, 2.0]})


@pytest.mark.parametrize("meddle", [LRScheduler.step, load_own_state])
def test_scheduler_that_the_trial_also_steps_or_loads_is_an_error(meddle):
    scheduler = lr_scheduler.StepLR(make_optimizer(), 2)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    move(schedule, 0, 1)
    scheduler.optimizer.step()  # else torch warns
    meddle(scheduler)
    words = r"^wrap_lr_scheduler: StepLR was stepped, or its state loaded, outside"
    with pytest.raises(ConfigError, match=words):
        move(schedule, 2)


def test_parameter_group_that_was_added_later_keeps_its_rate_and_is_logged_once(caplog):
    optimizer = make_optimizer(groups=1)
    schedule = AppliedStepSchedule(
        lr_scheduler.ExponentialLR(optimizer, 0.5), CPU, skips=False
    )
    schedule.move(0, 0)
    assert not caplog.text
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 2.0})
    for step in (1, 2):
        schedule.move(step, step)
    assert [group["lr"] for group in optimizer.param_groups] == [RATES[0] / 4, 2.0]
    assert (
        caplog.text.count(
            "ExponentialLR does not move the parameter groups that were added"
        )
        == 1
    )


def test_rate_that_is_a_tensor_on_the_host_is_scheduled_and_not_written():
    rate = torch.tensor(0.5)  # float32
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = AppliedStepSchedule(halving(optimizer), CPU, skips=True)
    assert move(schedule, 0, 1, 2) == [0.5, 0.25, 0.125]
    assert rate.item() == 0.5


def test_rate_that_is_already_on_a_device_is_refused():
    optimizer = make_optimizer(groups=1)
    scheduler = halving(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    words = r"^wrap_lr_scheduler: lr of .* group 0 is a tensor on meta; allowed: a numb"
    with pytest.raises(ConfigError, match=words):
        AppliedStepSchedule(scheduler, CPU, skips=True)


# By validations


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_metric_that_is_not_finite_is_logged_and_moves_no_plateau_scheduler(
    metric, caplog
):
    schedule = PlateauSchedule(lr_scheduler.ReduceLROnPlateau(make_optimizer()))
    before = schedule.state_dict()
    schedule.validated(metric)
    assert schedule.state_dict() == before
    assert caplog.messages == [
        f"ReduceLROnPlateau ignores a validation metric of {metric}"
    ]


# In Determined's loop


# the first is skipped
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_drift_from_applied_steps_is_reported_if_determined_moves_a_schedule():
    """The second batch overflows."""
    by_library, by_determined = (
        run_of(halving, mode)(6).report
        for mode in (None, Modes.STEP_EVERY_OPTIMIZER_STEP)
    )
    assert "watch_lr_drift_steps" not in by_library
    assert by_determined["watch_lr_drift_steps"] == 1
