"""Trials of plain float32, trained in mixed precision without a changed line.

`Plain` must train as `Converted`, the same trial with the lines of docs/your_trial.md,
to the bit. The trials of `habits.py` must train as in float32, or be refused.
`test_mistakes.py` has what is refused in every precision.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module
from torch.utils.checkpoint import checkpoint

from determined_amp import ConfigError
from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.window import RUNNING
from determined_amp.trial.determined_private import amp_of
from tests import habits
from tests.habits import CLASSES, FEATURES
from tests.harness import (
    Fitted,
    as_it_is,
    every_precision,
    fit,
    fit_as_it_is,
    same_bits,
)
from tests.run_here import computed
from tests.trials import Converted, Plain

# A scheduler that Determined moves is moved by a skipped first step, too.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")


# The first step overflows: 2^24 times a gradient of about 0.1. Two good ones double the
# scale.
FP16 = {"precision": "amp_fp16", "init_scale": 2.0**24, "growth_interval": 2}
BFLOAT16 = {"precision": "amp_bf16"}


def same_state(*runs):
    """Weights, optimizers, scale, counts and random state."""
    states = [made.checkpoint for made in runs]
    for each in states:
        each["callbacks"].pop("determined_amp.unmodified", None)
    return same_bits(*states)


@every_precision
@pytest.mark.parametrize("aggregation_frequency", [1, 2], ids=["1 batch", "2 batches"])
def test_unmodified_trial_trains_as_the_converted_one_bit_for_bit(
    precision, aggregation_frequency
):
    amp = FP16 if precision == "amp_fp16" else {"precision": precision}
    ours, theirs = (
        fit_as_it_is(trial, amp, aggregation_frequency=aggregation_frequency)
        for trial in (Plain, Converted)
    )
    assert same_state(ours, theirs)
    assert ours.reports.validation == theirs.reports.validation
    names = {name.partition(".")[0] for name in ours.checkpoint["callbacks"]}
    assert names == {"determined_amp"}  # they hide no callback of the trial's own
    reports = (computed(made.reports.training, "loss") for made in (ours, theirs))
    for report, expected in zip(*reports, strict=True):
        assert report == pytest.approx(expected, nan_ok=True)
    assert bool(ours.report.get("skipped_steps")) == (precision == "amp_fp16")


class TestForward:
    @pytest.mark.parametrize("eval_precision", ["fp32", "same"])
    def test_validation_is_in_the_precision_of_the_settings(self, eval_precision):
        seen = []

        def note(model, _, output):
            seen.append((model.training, output.dtype))

        class Noting(nn.Linear):
            def forward(self, x):
                output = super().forward(x)
                note(self, x, output)
                return output

        class Watching(Plain):
            def net(self):
                model = Noting(FEATURES, CLASSES)
                model.register_forward_hook(note)
                return model

        fit_as_it_is(Watching, {**BFLOAT16, "eval_precision": eval_precision})
        validated = torch.bfloat16 if eval_precision == "same" else torch.float32
        # Inside, then as handed on.
        assert set(seen[::2]) == {(True, torch.bfloat16), (False, validated)}
        assert {dtype for _, dtype in seen[1::2]} == {torch.float32}

    def test_wrapped_model_in_another_stays_in_16_bits_under_a_checkpoint_too(self):
        """Only what the outer one returns is cast to float32."""
        dtypes = set()

        class Outer(nn.Module):
            def __init__(self, inner, reentrant):
                super().__init__()
                self.inner, self.reentrant = inner, reentrant
                self.head = nn.Linear(CLASSES, CLASSES)

            def forward(self, x):
                if self.reentrant is None:
                    x = self.inner(x)
                    dtypes.add(x.dtype)
                else:
                    x = x.requires_grad_()
                    x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
                return self.head(x)

        class Nested(Plain):
            reentrant = None

            def net(self):
                inner = self.context.wrap_model(nn.Linear(FEATURES, CLASSES))
                return Outer(inner, self.reentrant)

        amp = {**BFLOAT16, "eval_precision": "same"}
        runs = []
        for Nested.reentrant in (None, False, True):
            runs.append(fit_as_it_is(Nested, amp))
        assert same_state(*runs)
        assert dtypes == {torch.bfloat16}
        assert not autocast_is_on("cpu")

    def test_forward_hook_gets_the_tensor_that_is_handed_on_and_may_change_it(self):
        gradients = []

        def zero(module, inputs, output):
            if output.requires_grad:
                output.register_hook(gradients.append)
            output.mul_(0)

        class Zeroes(Plain):
            def net(self):
                last = nn.Linear(8, CLASSES, bias=False)
                model = nn.Sequential(nn.Linear(FEATURES, 8), last)
                model[0].register_forward_hook(zero)
                return model

        made = fit_as_it_is(Zeroes, BFLOAT16, batches=1)
        assert made.report["loss"] == pytest.approx(math.log(CLASSES))
        assert {each.dtype for each in gradients} == {torch.float32}

    def test_copy_has_weights_of_its_own_and_a_pickled_model_is_the_plain_one(self):
        model, inputs = (
            fit_as_it_is(Plain, BFLOAT16).trial.model.eval(),
            torch.ones(2, FEATURES),
        )
        average, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.zero_()
        assert not average(inputs).any()
        assert model(inputs).any()
        assert torch.equal(again(inputs), model(inputs))


def test_training_leaves_torch_and_its_classes_as_they_were():
    """No name of the package itself changes, not even in a forward."""
    owners = (torch.Tensor, torch.autograd.Variable, torch.autograd.Function, nn.Module)
    copy.copy(torch.ones(1))  # Python notes on the class what a copy has to copy
    before = [dict(vars(owner)) for owner in owners]
    package, seen = dict(vars(torch)), []

    class LooksAtTorch(Plain):
        def loss(self, inputs, classes):
            now = vars(torch)
            seen.extend(name for name in package if now[name] is not package[name])
            return super().loss(inputs, classes)

    fit_as_it_is(LooksAtTorch, FP16)
    assert seen == []
    assert [dict(vars(owner)) for owner in owners] == before


OTHERS = habits.NO_HABITS | habits.REFUSED_IN_16_BITS
HABITS = [
    each
    for each in vars(habits).values()
    if isinstance(each, type) and issubclass(each, habits.Habit) and each not in OTHERS
]
IN_16_BITS = [
    (habit, precision)
    for precision in ("amp_bf16", "amp_fp16")
    for habit in HABITS
    if precision == "amp_bf16" or habit not in habits.REFUSED_IN_FP16
]


SCALE = {
    "amp_bf16": {},
    "amp_fp16": {"init_scale": 1024.0},
}


@dataclasses.dataclass
class Way:
    """How a habit trained.

    Args:
        made: The run.
        start: Its weights before, flat.
        end: The same after it.
        still: The batches that left them where they were.
    """

    made: Fitted
    start: torch.Tensor
    end: torch.Tensor
    still: list[int]

    def distance(self, other):
        """Between the ends of two ways, as a share of the way."""
        return float((self.end - other.end).norm() / (self.end - self.start).norm())


def flat_weights(trial):
    """Of its models and those that it keeps itself, (N,) float32."""
    leaves = [p for model in trial.context.models for p in model.parameters()]
    leaves += [it for it in vars(trial).values() if isinstance(it, nn.Parameter)]
    real = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in leaves]
    return torch.cat([leaf.flatten() for leaf in real]).detach().clone()


def way(habit, amp, without=(), **options):
    """Train a habit, in plain Determined if `amp` is None; batches in `without` change
    nothing.
    """
    starts = []
    still = []

    class Watched(habit):  # type: ignore[valid-type,misc]
        def __init__(self, context):
            super().__init__(context)
            starts.append(flat_weights(self))

        def train_batch(self, batch, epoch_idx, batch_idx):
            if batch_idx in without:
                return {"loss": 0.0}
            before = flat_weights(self)
            reported = super().train_batch(batch, epoch_idx, batch_idx)
            if torch.allclose(before, flat_weights(self), rtol=0, atol=1e-6):
                still.append(batch_idx)
            return reported

    Watched.__module__ = habit.__module__
    make = Watched if amp is None else as_it_is(Watched, amp)
    made = fit(make, amp, **{"batches": 8, "reporting_period": 8, **options})
    return Way(made, starts[0], flat_weights(made.trial), still)


@functools.cache
def plain(habit):
    """Trained in plain Determined."""
    return way(habit, None)


@functools.cache
def in_16_bits(habit, precision):
    """Trained as it is in 16 bits, without overflow."""
    return way(habit, {"precision": precision, **SCALE[precision]})


@pytest.mark.parametrize("habit", [*HABITS, habits.LineSearch])
def test_unmodified_trial_in_fp32_is_plain_determined_to_the_bit(habit):
    ours = way(habit, {"precision": "fp32"})
    assert torch.equal(ours.end, plain(habit).end)
    assert not torch.equal(ours.start, ours.end)
    validation = plain(habit).made.reports.validation
    assert ours.made.reports.validation[-1] == validation[-1]


@pytest.mark.parametrize(("habit", "precision"), IN_16_BITS)
def test_unmodified_trial_in_16_bits_trains_as_in_float32(habit, precision):
    """How far 16 bits may take the weights from where float32 takes them, as a share of
    the way.
    """
    rounding = {"amp_bf16": 0.015, "amp_fp16": 0.002}[precision]
    ours = in_16_bits(habit, precision)
    assert ours.distance(plain(habit)) < rounding
    assert ours.made.report["watch_audit_share"] > 0.5
    theirs = plain(habit).made.report
    assert {name: ours.made.report[name] for name in theirs} == pytest.approx(
        theirs, rel=2 * rounding
    )


@pytest.mark.parametrize(("habit", "words"), habits.REFUSED_IN_FP16.items())
def test_unmodified_trial_that_a_loss_scale_would_break_is_refused_in_fp16(
    habit, words
):
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        way(habit, {"precision": "amp_fp16", "init_scale": 1024.0})
    assert "precision amp_bf16, which needs no loss scale" in str(error.value)


LOUD = {"precision": "amp_fp16", "init_scale": 2.0**24, "audit": False}
LESS_LOUD = {**LOUD, "init_scale": 1024.0}


@pytest.mark.parametrize("habit", habits.USE_GRADIENTS)
def test_window_that_overflows_changes_nothing(habit):
    """The batches after it train as in float32 without it."""
    ours = way(habit, {**LOUD, "growth_interval": 1000}, batches=16)
    assert 2 < len(ours.still) < 10
    plain = way(habit, None, batches=16, without=ours.still)
    # Where one backward of two overflowed, the step is made with the other.
    assert ours.distance(plain) < 0.002


class Rehearses(Plain):
    """Accumulates two batches itself, of which the first overflows, and rehearses the
    second.
    """

    def train_batch(self, batch, epoch_idx, batch_idx):
        amp: Any = amp_of(self.context)
        is_first = batch_idx == 0
        loss = self.loss(*batch) * (1e30 if is_first else 1.0)
        self.context.backward(loss)
        if not (is_first or amp.is_rehearsing):
            amp._batches.rehearsal().run(None)
            self.found_inf = amp.windows[self.optimizer].found_inf
        return {"loss": 0.0}


def test_rehearsal_leaves_the_overflow_of_a_window_that_goes_on():
    made = fit_as_it_is(Rehearses, LOUD, batches=2)
    assert float(made.trial.found_inf) == 1


def fails():
    raise ZeroDivisionError


class StepsThatRaise(Plain):
    """Steps by itself, and goes on after a step that has raised an error, as in each
    validation.
    """

    def raise_in_a_step(self):
        with contextlib.suppress(ZeroDivisionError):
            torch.optim.SGD(self.model.parameters(), lr=0.1).step(fails)

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.context.backward(self.loss(*batch))
        if batch_idx == 1:
            self.raise_in_a_step()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": 0.0}

    def evaluate_batch(self, batch, batch_idx):
        self.raise_in_a_step()
        return super().evaluate_batch(batch, batch_idx)


def test_own_step_that_raises_is_over_and_hides_no_later_one():
    made = fit_as_it_is(StepsThatRaise, {"precision": "fp32"}, batches=4)
    assert RUNNING.window is None
    amp = amp_of(made.trial.context)
    assert amp is not None
    assert amp.attempted_steps == 3


def test_overflow_of_one_batch_costs_the_step_of_its_window():
    """The batches between wait for the second batch of their window."""
    ours = way(habits.LoudAtFirst, LESS_LOUD, aggregation_frequency=2)
    assert ours.still == [0, 1, 2, 4, 6]
    plain = way(habits.LoudAtFirst, None, (0, 1), aggregation_frequency=2)
    assert ours.distance(plain) < 0.002


@pytest.mark.parametrize(
    "habit", [habits.Adversarial, habits.ProjectsGradients, habits.Complex]
)
def test_scale_that_the_finder_names_is_the_largest_that_skips_no_step(habit, caplog):
    caplog.set_level("INFO")
    finds = {"precision": "amp_fp16", "init_scale": "find"}
    fit_as_it_is(habit, finds, batches=1)
    (found,) = re.findall(r"safe range: 2\^\S+ to 2\^(\S+),", caplog.text)
    top = int(found)
    reports = [
        way(
            habit, {**LOUD, "init_scale": 2.0**scale}, batches=1, reporting_period=1
        ).made.report
        for scale in (top, top + 1)
    ]
    assert [report["skipped_steps"] for report in reports] == [0, 1]


class ZeroesInPlace(habits.LoudAtFirst):
    """Keeps its gradients after a step, and fills them with zeros."""

    def step(self):
        self.context.step_optimizer(self.optimizer, auto_zero_grads=False)
        for gradient in self.gradients():
            gradient.zero_()


class LeavesOutItsFirstStep(ZeroesInPlace):
    """The one that overflows: it looks at its gradients, which are 0."""

    def step(self):
        if any(bool(gradient.any()) for gradient in self.gradients()):
            super().step()
        else:
            self.model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("habit", [ZeroesInPlace, LeavesOutItsFirstStep])
def test_gradients_that_stay_after_their_window_skip_no_step_of_the_next(habit):
    assert way(habit, LESS_LOUD, batches=3).still == [0]


class LoudOwnWindow(habits.OwnAccumulation):
    """The first of the two batches of its first own window overflows."""

    def loss(self, inputs, classes):
        loss, self.losses = (
            super().loss(inputs, classes),
            getattr(self, "losses", 0) + 1,
        )
        return loss * 1e6 if self.losses == 1 else loss


def test_own_window_that_overflows_is_skipped_and_lowers_the_scale_once():
    ours = way(LoudOwnWindow, LESS_LOUD, batches=4)
    assert ours.still == [0, 1, 2]
    assert ours.made.report["loss_scale_log2"] == 9


class WithBias(habits.LoudAtFirst):
    """Has a bias that is stepped in every batch, beside a model that is stepped seldom.
    The loss of the first batch overflows.
    """

    def __init__(self, context):
        super().__init__(context)
        self.bias = nn.Parameter(torch.zeros(CLASSES))
        self.second = context.wrap_optimizer(torch.optim.SGD([self.bias], lr=0.1))

    def loss(self, inputs, classes):
        return super().loss(inputs, classes) + self.bias.square().sum()

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.is_loud = batch_idx == 0
        loss = self.loss(*batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.second)
        self.go_on(batch_idx)
        return {"loss": loss}

    def go_on(self, batch_idx):
        """Steps in every second batch."""
        if batch_idx % 2:
            self.context.step_optimizer(self.optimizer)


class DropsGradients(WithBias):
    """Has no step in the first batch, and drops its gradients."""

    def go_on(self, batch_idx):
        if batch_idx:
            self.context.step_optimizer(self.optimizer)
        self.model.zero_grad()


@pytest.mark.parametrize(
    ("trial", "skipped", "applied"),
    [(WithBias, [1, 1], [1, 3]), (DropsGradients, [0, 1], [3, 3])],
)
def test_overflow_skips_the_step_of_each_window_that_it_is_in(trial, skipped, applied):
    """A step of another optimizer does not end a window; dropped gradients do."""
    report = way(trial, LESS_LOUD, batches=4).made.report
    for name, counts in (("skipped_steps", skipped), ("watch_applied_steps", applied)):
        assert [report[f"{name}_{optimizer}"] for optimizer in (0, 1)] == counts


@pytest.mark.parametrize("habit", [habits.StepsByHand, habits.StepsByHandInPlace])
def test_step_by_hand_moves_the_scale_once_a_batch(habit):
    amp = {
        **LOUD,
        "init_scale": 2.0**40,
        "backoff_factor": 2.0**-30,
        "growth_interval": 3,
    }
    ours = way(habit, amp, batches=5)
    assert ours.still == [0]
    assert ours.made.report["loss_scale_log2"] == 11


def test_steps_of_one_batch_and_of_an_optimizer_inside_another_are_all_counted():
    (inside,), several = (
        [
            count
            for name, count in it.made.report.items()
            if name.startswith("watch_applied_steps")
        ]
        for it in (
            in_16_bits(habits.Sam, "amp_bf16"),
            in_16_bits(habits.Wgan, "amp_fp16"),
        )
    )
    assert (inside, several) == (8, [24, 8])


def test_hook_for_all_modules_is_refused_in_a_backward():
    """Whenever and however it was registered: here before the training, by torch's
    function.
    """
    register = module.register_module_full_backward_pre_hook
    handle = register(lambda module, gradients: None)
    try:
        with pytest.raises(ConfigError, match="it has a hook in the backward"):
            way(habits.Habit, {"precision": "amp_fp16"})
    finally:
        handle.remove()


class AddsLossesUp(habits.Habit):
    """Adds the second loss of a batch to the first one in place, and reports
    neither.
    """

    def __init__(self, context):
        super().__init__(context)
        self.totals = []

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss, other = self.loss(*batch), self.loss(*batch)
        total = loss.detach()
        self.context.backward(loss)
        total += other.detach()
        self.context.backward(other)
        self.step()
        self.totals.append(float(total))
        return {}


def test_losses_that_a_trial_adds_up_in_place_are_reported_as_they_were():
    made = fit_as_it_is(AddsLossesUp, {"precision": "fp32"}, reporting_period=8)
    totals = made.trial.totals
    assert made.report["loss"] == pytest.approx(sum(totals) / len(totals))


class LearnsAnOffsetLater(habits.Habit):
    """Its loss gets one more leaf after some batches, in a graph of the same size."""

    def __init__(self, context):
        super().__init__(context)
        self.seen: list[float | None] = []

    def train_batch(self, batch, epoch_idx, batch_idx):
        offset = torch.zeros(1, requires_grad=batch_idx > 2)
        self.context.backward(self.loss(*batch) + offset.sum())
        self.seen.append(None if offset.grad is None else float(offset.grad))
        self.step()
        return {}


def test_leaf_that_comes_later_has_its_true_gradient():
    amp = {"precision": "amp_fp16", "init_scale": 64.0}
    made = fit_as_it_is(LearnsAnOffsetLater, amp)
    assert made.trial.seen[-8:] == [None] * 3 + [1.0] * 5
