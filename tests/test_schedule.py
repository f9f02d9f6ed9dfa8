"""Any torch scheduler moves with the steps that were applied, and resumes, to the last
bit.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from determined_amp.amp.counts import StepCounts
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.plain_data import Metrics, Values
from determined_amp.amp.schedules import AppliedStepSchedule, PlateauSchedule
from tests.fake_cuda import Syncs, fake_cuda, needs_fake_cuda
from tests.harness import Fitted, fit, loader, needs_fused
from tests.trials import Weights

CPU = torch.device("cpu")
RATES = (0.3, 0.05)  # of the parameter groups
STEPS = 600  # more than two chunks that a scheduler runs ahead

MakeOptimizer = Callable[..., Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
# What a step uses: for every group, the values that schedulers move.
Used = list[dict[str, Any]]


def make_optimizer(
    kind: MakeOptimizer = SGD, groups: int = 2, says_fused: bool = False
) -> Optimizer:
    """Not every torch has a fused one for a CPU; the plain one takes a rate on the
    device too.
    """
    settings: Values = {"momentum": 0.9} if kind is SGD else {}
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
    """Constant for a chunk that it runs ahead, and then not."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 300 else 0.5)


class OfLastRate(LRScheduler):
    """A user's own, which goes on from the rates that it answered last."""

    def get_lr(self) -> list[float | torch.Tensor]:
        rates = self._last_lr if self.last_epoch else self.base_lrs
        return [rate * 0.99 for rate in rates]


def own_functions(optimizer: Optimizer) -> LRScheduler:
    functions: list[Callable[[int], float]] = [
        lambda step: 0.9**step,
        lambda step: 1 / (1 + step),
    ]
    return lr_scheduler.LambdaLR(optimizer, functions[: len(optimizer.param_groups)])


def one_cycle(optimizer: Optimizer, cycle_momentum: bool = True) -> LRScheduler:
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
SCHEDULERS: dict[str, tuple[MakeOptimizer, MakeScheduler]] = {
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
}
EVERY_SCHEDULER = pytest.mark.parametrize(
    ("kind", "make_scheduler"), SCHEDULERS.values(), ids=SCHEDULERS
)
FUSED_OR_NOT = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])


def scheduled(
    make_scheduler: MakeScheduler,
    kind: MakeOptimizer = SGD,
    *,
    groups: int = 2,
    fused: bool = False,
    skips: bool = True,
) -> AppliedStepSchedule:
    """The schedule of an optimizer of its own."""
    optimizer = make_optimizer(kind, groups, says_fused=fused)
    return AppliedStepSchedule(make_scheduler(optimizer), CPU, skips=skips)


def move(schedule: AppliedStepSchedule, *steps: int) -> list[float]:
    """The rate of the first group after each of these steps, of which none was
    skipped.
    """
    rates = []
    for step in steps:
        schedule.move(step, torch.tensor(step))
        rates.append(used_by(schedule.optimizer)[0]["lr"])
    return rates


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


@EVERY_SCHEDULER
@FUSED_OR_NOT
def test_rate_of_every_step_is_that_of_torchs_own_loop_over_the_applied_steps(
    kind: MakeOptimizer, make_scheduler: MakeScheduler, fused: bool
) -> None:
    optimizer = make_optimizer(kind)
    expected = plain(optimizer, make_scheduler(optimizer), STEPS)
    schedule = scheduled(make_scheduler, kind, fused=fused)
    used_by_attempted_steps = []
    for attempted, applied, used in followed(schedule, 0, 0, STEPS):
        # Whatever a fused optimizer cannot read from the device follows attempted
        # steps.
        others = expected[attempted if fused else applied]
        rates = [{"lr": values["lr"]} for values in expected[applied]]
        assert used == [
            values | rate for values, rate in zip(others, rates, strict=True)
        ]
        used_by_attempted_steps.append(used == expected[attempted])
    assert applied < attempted - 100
    # a schedule that counts skipped steps is seen
    assert not all(used_by_attempted_steps)

    schedule = scheduled(make_scheduler, kind, fused=fused, skips=False)
    for attempted in range(300):
        schedule.move(attempted, torch.tensor(attempted))
        assert used_by(schedule.optimizer) == expected[attempted]
        assert {type(group["lr"]) for group in schedule.optimizer.param_groups} == {
            float
        }


def spoil(optimizer: Optimizer) -> None:
    """What a checkpoint with other values leaves in every group."""
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for key in (
            "lr",
            "initial_lr",
            "max_lr",
            "min_lr",
            "max_momentum",
            "base_momentum",
        ):
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
def test_resume_at_any_step_has_the_rates_of_an_undisturbed_run(
    kind: MakeOptimizer, make_scheduler: MakeScheduler, fused: bool
) -> None:
    schedule = partial(scheduled, make_scheduler, kind, fused=fused)
    undisturbed = list(followed(schedule(), 0, 0, 300))
    # What the scheduler leaves alone is the checkpoint's.
    first = undisturbed[0][2][0]
    keys = {
        key for key in first if any(it[2][0][key] != first[key] for it in undisturbed)
    }
    for attempted, applied, _ in [
        *undisturbed[:6],
        undisturbed[11],
        *undisturbed[255:258],
    ]:
        resumed = schedule()
        spoil(resumed.optimizer)
        continued = list(followed(resumed, attempted, applied, 20))
        expected = undisturbed[attempted : attempted + 20]
        assert [run[:2] for run in continued] == [run[:2] for run in expected]
        assert moving(continued, keys) == moving(expected, keys)


def table(*factors: float) -> MakeScheduler:
    return partial(lr_scheduler.LambdaLR, lr_lambda=factors.__getitem__)


# A scheduler that raises, and the steps that it knows.
ENDS: dict[str, tuple[MakeScheduler, int]] = {
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
    name: str, later: int, fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
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
def test_scheduler_that_raises_at_its_first_step_is_an_error_with_its_own_text(
    fused: bool,
) -> None:
    def forgets_a_name(step: int) -> float:
        return factor if step else 1.0  # type: ignore[name-defined]  # noqa: F821

    schedule = scheduled(
        partial(lr_scheduler.LambdaLR, lr_lambda=forgets_a_name), fused=fused
    )
    words = (
        r"^wrap_lr_scheduler: LambdaLR raised at its first step: NameError: name 'fa"
    )
    with pytest.raises(ConfigError, match=words):
        move(schedule, 0)


@pytest.mark.parametrize(("kind", "key"), [(SGD, "momentum"), (Adam, "betas")])
def test_log_warns_once_of_what_follows_attempted_steps_in_a_fused_optimizer(
    kind: MakeOptimizer, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    list(followed(scheduled(one_cycle, kind, fused=True), 0, 0, STEPS - 1))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"OneCycleLR moves {key} of a fused optim" in record.getMessage()


@pytest.mark.parametrize(
    ("fused", "skips", "cycle_momentum"),
    [(True, False, True), (False, True, True), (True, True, False)],
    ids=["nothing is skipped", "not fused", "only the rate moves"],
)
def test_log_says_nothing_where_everything_follows_applied_steps(
    *, fused: bool, skips: bool, cycle_momentum: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(one_cycle, cycle_momentum=cycle_momentum)
    list(followed(scheduled(make, fused=fused, skips=skips), 0, 0, STEPS - 1))
    assert caplog.messages == []


@FUSED_OR_NOT
def test_get_last_lr_answers_the_rates_in_use_while_the_scheduler_is_ahead(
    fused: bool,
) -> None:
    optimizer = make_optimizer(says_fused=fused)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    for attempted, applied in [(0, 0), (1, 0), (2, 1), (3, 2)]:
        schedule.move(attempted, torch.tensor(applied))
        assert [float(lr) for lr in scheduler.get_last_lr()] == [
            lr * 0.5**applied for lr in RATES
        ]
    assert scheduler.last_epoch > 200


@pytest.mark.parametrize("make_scheduler", [late, warm_then_cosine])
def test_scheduler_that_runs_ahead_hides_torchs_warnings_of_that_and_no_others(
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
def test_scheduler_that_the_trial_also_steps_or_loads_is_an_error(
    meddle: Callable[[LRScheduler], None],
) -> None:
    scheduler = lr_scheduler.StepLR(make_optimizer(), 2)
    schedule = AppliedStepSchedule(scheduler, CPU, skips=True)
    move(schedule, 0, 1)
    scheduler.optimizer.step()  # else torch warns
    meddle(scheduler)
    words = r"^wrap_lr_scheduler: StepLR was stepped, or its state loaded, outside"
    with pytest.raises(ConfigError, match=words):
        move(schedule, 2)


def test_resume_in_a_precision_without_a_scale_counts_the_steps_skipped_before() -> (
    None
):
    schedule = scheduled(halving, groups=1, skips=False)
    for attempted, applied in ((5, 3), (6, 4)):
        schedule.move(attempted, applied)
        assert schedule.optimizer.param_groups[0]["lr"] == 0.3 * 0.5**applied


def test_parameter_group_that_was_added_later_keeps_its_rate_and_is_logged_once(
    caplog: Any,
) -> None:
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


def test_rate_that_is_a_tensor_on_the_host_is_scheduled_and_not_written() -> None:
    rate = torch.tensor(0.5)  # float32
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = AppliedStepSchedule(halving(optimizer), CPU, skips=True)
    assert move(schedule, 0, 1, 2) == [0.5, 0.25, 0.125]
    assert rate.item() == 0.5


# Without a GPU


@contextmanager
def moved_on_fake_cuda(
    *, fused: bool, skips: bool
) -> Iterator[tuple[Syncs, AppliedStepSchedule]]:
    """A schedule after all of its steps, and what was counted meanwhile."""
    device = torch.device("cuda")
    with fake_cuda() as syncs:
        weights = [nn.Parameter(torch.zeros(1, device=device)) for _ in RATES]
        groups = [
            {"params": [it], "lr": lr} for it, lr in zip(weights, RATES, strict=True)
        ]
        scheduler = one_cycle(Adam(groups, fused=fused))
        schedule = AppliedStepSchedule(scheduler, device, skips=skips)
        counts = StepCounts(device, can_skip=skips)
        schedule.place_rate(counts)
        on_device = torch.zeros((), device=device)
        with syncs.during("steps"):
            for _ in range(STEPS):
                counts.count(on_device if fused and skips else False)
                schedule.place_rate(counts)
        yield syncs, schedule


@needs_fake_cuda
def test_fused_step_is_two_kernels_and_waits_for_nothing() -> None:
    with moved_on_fake_cuda(fused=True, skips=True) as (syncs, schedule):
        groups = schedule.optimizer.param_groups
        rates = {
            (it["lr"].dtype, it["lr"].device.type, it["lr"].dim()) for it in groups
        }
        assert rates == {(torch.float32, "cuda", 0)}
        # A transfer of a chunk does not wait.
        assert syncs.waits["steps"] == {}
        calls = syncs.calls["steps"]
        assert (calls["clamp"], calls["index_select"], calls["cat"]) == (
            *(STEPS, STEPS),
            2,
        )


@needs_fake_cuda
@pytest.mark.parametrize(
    ("fused", "skips"),
    [(False, True), (False, False), (True, False)],
    ids=["unfused", "no skips", "no skips, fused"],
)
def test_schedule_of_steps_that_the_host_knows_does_not_use_the_device(
    *, fused: bool, skips: bool
) -> None:
    with moved_on_fake_cuda(fused=fused, skips=skips) as (syncs, schedule):
        assert (syncs.waits["steps"], syncs.calls["steps"]) == ({}, {})
        rates = [group["lr"] for group in schedule.optimizer.param_groups]
        assert all(type(rate) is float for rate in rates)
        assert rates != [*RATES]


@needs_fake_cuda
def test_rate_that_is_already_on_the_device_is_refused() -> None:
    with fake_cuda():
        weight = nn.Parameter(torch.zeros(1, device="cuda"))
        rate = torch.tensor(0.1, device="cuda")
        scheduler = lr_scheduler.StepLR(Adam([weight], lr=rate, fused=True), 2)
        words = (
            r"^wrap_lr_scheduler: lr of .* group 0 is a tensor on cuda.*allowed: a"
            r" number"
        )
        with pytest.raises(ConfigError, match=words):
            AppliedStepSchedule(scheduler, torch.device("cuda"), skips=True)


# By validations


def plateau(optimizer: Optimizer, **settings: Any) -> PlateauSchedule:
    settings = {"patience": 1, "cooldown": 1, "factor": 0.5, **settings}
    return PlateauSchedule(lr_scheduler.ReduceLROnPlateau(optimizer, **settings))


METRICS = (5.0, 4.0, 4.0, 4.5, 4.0, 3.0, 3.5, 3.5, 3.5, 3.6, 3.7, 3.8)


def rates_after(
    schedule: PlateauSchedule, metrics: tuple[float, ...]
) -> list[list[float]]:
    rates = []
    for metric in metrics:
        schedule.validated(metric)
        rates.append([group["lr"] for group in schedule.optimizer.param_groups])
    return rates


def test_plateau_scheduler_resumed_after_any_validation_has_the_same_rates() -> None:
    undisturbed = rates_after(plateau(make_optimizer()), METRICS)
    assert len({tuple(rates) for rates in undisturbed}) > 2
    for validated in range(len(METRICS)):
        first = plateau(make_optimizer())
        rates_after(first, METRICS[:validated])
        saved = io.BytesIO()
        torch.save(first.state_dict(), saved)
        saved.seek(0)
        second = plateau(make_optimizer())
        # as Determined does
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.load_state_dict(torch.load(saved, weights_only=True))
        assert second.state_dict() == first.state_dict()
        assert second._scheduler.get_last_lr() == first._scheduler.get_last_lr()
        assert rates_after(second, METRICS[validated:]) == undisturbed[validated:]


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf])
def test_metric_that_is_not_finite_is_logged_and_does_not_move_a_plateau_scheduler(
    metric: float, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = plateau(make_optimizer())
    before = schedule.state_dict()
    schedule.validated(metric)
    assert schedule.state_dict() == before
    assert caplog.messages == [
        f"ReduceLROnPlateau ignores a validation metric of {metric}"
    ]


# In Determined's loop

BATCHES = 12
Modes = pytorch.LRScheduler.StepMode


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.02, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def settings(optimizer: Optimizer) -> tuple[float, ...]:
    """Rate and momentum, or betas."""
    (group,) = optimizer.param_groups
    return (
        float(group["lr"]),
        float(group.get("momentum", 0)),
        *group.get("betas", ()),
    )


class Scheduled(Weights):
    """Notes what every batch steps with. Its second batch overflows in float16.

    Args:
        context: The trial's context.
        make_optimizer: Of its parameters.
        make_scheduler: Of its optimizer; None leaves the rate alone.
        mode: Of `context.wrap_lr_scheduler`; None has the library wrap it.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        make_optimizer: Callable[[Any], Optimizer],
        make_scheduler: Any = None,
        mode: Modes | None = None,
    ) -> None:
        self.optimizer_of = make_optimizer  # type: ignore[method-assign,assignment]
        self.mode = mode
        super().__init__(context)
        self.seen: list[tuple[float, ...]] = []
        if make_scheduler is None:
            return
        self.scheduler: Any = make_scheduler(self.optimizer)
        if mode is None:
            self.amp.wrap_lr_scheduler(self.scheduler)
        else:
            context.wrap_lr_scheduler(self.scheduler, mode)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.seen.append(settings(self.optimizer))
        reported = super().train_batch(batch, epoch_idx, batch_idx)
        if self.mode is Modes.MANUAL_STEP:
            self.scheduler.step()
        return reported

    def evaluate_batch(self, batch: Any, batch_idx: int) -> Metrics:
        return {"validation_loss": 1.0}

    def build_training_data_loader(self) -> Any:
        second = math.inf if self.amp.settings.scales_the_loss else 1.0
        rows = [[1.0], [second], *[[1.0]] * (BATCHES - 2)]
        # Some schedules are by epochs: three of four batches, the second of each
        # overflows.
        return loader(rows[:4] if self.mode is Modes.STEP_EVERY_EPOCH else rows)


FP16 = {"precision": "amp_fp16", "init_scale": 64.0}
FP32 = {"precision": "fp32"}


def runs(*arguments: Any, amp: Any = FP16, **options: Any) -> Callable[..., Fitted]:
    """Trains so many batches, from a run on if one is given."""

    def run(batches: int = BATCHES, resume: Fitted | None = None) -> Fitted:
        def make(context: pytorch.PyTorchTrialContext) -> Scheduled:
            return Scheduled(context, *arguments)

        return fit(make, amp, batches=batches, resume=resume, batch_size=1, **options)

    return run


def resumes_as_undisturbed(run: Callable[..., Fitted], *stops: int) -> list[Any]:
    """What an undisturbed run stepped with, after the same of one that was resumed."""
    undisturbed: list[Any] = run().trial.seen
    for stop in stops:
        assert run(BATCHES, run(stop)).trial.seen == undisturbed[stop:]
    return undisturbed


@pytest.mark.parametrize(
    ("optimizer", "mode"),
    [(adamw, None), *((sgd, mode) for mode in Modes)],
    ids=["moved by the library", *(mode.name for mode in Modes)],
)
def test_resumed_run_steps_with_the_rates_of_an_undisturbed_one(
    optimizer: Callable[[Any], Optimizer], mode: Modes | None
) -> None:
    """And with its momentum or betas, which one cycle moves, too."""
    run = runs(optimizer, one_cycle, mode)
    undisturbed = resumes_as_undisturbed(run, 1, 2, 5)
    assert len(set(undisturbed)) > (1 if mode is Modes.STEP_EVERY_EPOCH else 2)


def hyperbolic(optimizer: Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


# the first is skipped
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "frequency", [1, 2], ids=["1 batch a step", "2 batches a step"]
)
def test_library_moves_a_schedule_with_applied_steps_and_determined_with_all(
    frequency: int,
) -> None:
    """The second batch overflows: its step is skipped, and no rate is passed over for
    it.
    """
    rates = [0.02 * (1 / (1 + step)) for step in range(BATCHES)]
    skipped = 1 if frequency == 1 else 0
    library, context = (
        runs(sgd, hyperbolic, mode, aggregation_frequency=frequency)()
        for mode in (None, Modes.STEP_EVERY_OPTIMIZER_STEP)
    )

    def by_window(made: Fitted) -> list[float]:
        return [rate for rate, *_ in made.trial.seen[frequency - 1 :: frequency]]

    steps = BATCHES // frequency
    stands_still = [rates[max(0, step - (step > skipped))] for step in range(steps)]
    assert by_window(library) == stands_still
    assert by_window(context) == rates[:steps]
    assert "watch_lr_drift_steps" not in library.report
    assert context.report["watch_lr_drift_steps"] == 1


def impatient(optimizer: Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def test_resumed_run_has_the_rate_and_the_patience_of_its_plateau_scheduler() -> None:
    """The loss never improves: after the second validation each halves the rate."""
    run = runs(sgd, impatient, validation_period=2)
    rates = [rate for rate, _ in resumes_as_undisturbed(run, 4, 8)]
    assert rates == [0.02 * 0.5 ** max(0, batch // 2 - 1) for batch in range(BATCHES)]


def test_resume_keeps_settings_of_the_checkpoint_and_logs_what_the_yaml_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(rate: float, momentum: float = 0.9) -> Callable[..., Fitted]:
        return runs(
            lambda parameters: SGD(parameters, rate, momentum=momentum), amp=FP32
        )

    first = run(0.5)(4)
    assert run(0.5)(6, first).trial.seen == [(0.5, 0.9)] * 2
    assert "of the checkpoint (YAML" not in caplog.text
    assert run(0.25, 0.0)(6, first).trial.seen == [(0.5, 0.9)] * 2
    (line,) = (line for line in caplog.messages if "of the checkpoint (YAML" in line)
    assert line.startswith(
        "optimizer 0 (SGD) keeps lr 0.5 of the checkpoint (YAML: 0.25), momentum 0.9 "
        "of the checkpoint (YAML: 0.0). A new run from the weights"
    )


def halving_later(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


@pytest.mark.parametrize(
    "fused",
    [
        pytest.param(False, id="unfused"),
        pytest.param(True, marks=needs_fused, id="fused"),
    ],
)
def test_resume_takes_a_scheduled_rate_from_the_new_yaml_at_once(
    fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def run(rate: float) -> Callable[..., Fitted]:
        return runs(
            lambda parameters: SGD(parameters, rate, fused=fused), halving_later
        )

    resumed = run(0.25)(8, run(0.5)(4))
    assert [rate for rate, *_ in resumed.trial.seen] == [0.25, 0.25, 0.125, 0.125]
    assert "of the checkpoint (YAML" not in caplog.text


@needs_fused
def test_resume_steps_by_the_kernels_of_its_own_optimizer() -> None:
    """Otherwise torch's scaler leaves an overflow to a fused kernel that is not
    called.
    """

    def run(fused: bool) -> Callable[..., Fitted]:
        return runs(lambda parameters: SGD(parameters, 0.5, fused=fused))

    for then, now in ((True, False), (False, True)):
        resumed = run(now)(4, run(then)(1))  # the second batch overflows
        assert resumed.trial.optimizer.param_groups[0]["fused"] is now
        assert all(bool(p.isfinite().all()) for p in resumed.trial.model.parameters())
        assert resumed.report["skipped_steps"] == 1
