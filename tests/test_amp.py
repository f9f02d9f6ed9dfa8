"""The recipe in Determined's own loop, with numbers derived by hand; see
`tests.trials`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from determined_amp import ConfigError, MixedPrecision
from determined_amp.amp.patched import patched
from determined_amp.amp.settings import AmpSettings, EvalPrecision, Precision
from tests.harness import Context, needs_fused
from tests.trials import AMP, BF16, FP32, INF, ONE, OneWeight, weigh

without_a_scale = pytest.mark.parametrize(
    "amp", [FP32, BF16], ids=lambda amp: amp.precision.value
)


@without_a_scale
def test_checkpoint_of_a_precision_without_a_loss_scale_holds_no_scaler(amp):
    """A disabled scaler would be saved as {} and crash a later resume in amp_fp16."""
    made = weigh([ONE, ONE], amp)
    assert "scaler_state_dict" not in made.checkpoint
    assert not {"loss_scale_log2", "skipped_steps"} & made.report.keys()


class ClipsScaledGradients(OneWeight):
    """Planted: the clip sees scaled gradients (pytorch/examples issue 1196)."""

    def train_on(self, batch):
        with patched(self.amp, "clip", self.clip):
            return super().train_on(batch)

    def clip(self, optimizer, max_norm):
        found = self.amp.windows[optimizer]
        return lambda parameters: found.add_norm(
            nn.utils.clip_grad_norm_(parameters, max_norm)
        )


class StepsTwice(OneWeight):
    """Planted: `optimizer.step()` after `scaler.step()` (pytorch/vision pull request
    4874).
    """

    def train_on(self, batch):
        def clip(*given):
            clip_gradients = MixedPrecision.clip(self.amp, *given)

            def clip_and_step(parameters):
                clip_gradients(parameters)
                self.optimizer.step()

            return clip_and_step

        with patched(self.amp, "clip", clip):
            return super().train_on(batch)


class ForgetsTheScaler(OneWeight):
    """Planted: the scaler is not in the checkpoint (nanoGPT's train.py)."""

    def __init__(self, context, recipe):
        super().__init__(context, recipe)
        context._scaler = None


class UpdatesEveryBatch(OneWeight):
    """Planted: `scaler.update()` on every batch (Determined's own AMP test fixture)."""

    def train_on(self, batch):
        reported = super().train_on(batch)
        if self.context.current_train_batch() % 2 == 0:
            self.amp.scaler.update()
        return reported


def clip_sees_unscaled_gradients(trial):
    """The gradient is 1, clipped to 0.25: w = 1 - 0.5 * 0.25. Reported is the norm
    before: 1.

    `clip_grad_norm_` divides by norm + 1e-6, hence the tolerance.
    """
    made = weigh([ONE], max_norm=0.25, trial=trial)
    assert made.trial.trace == [pytest.approx(0.875, abs=2e-7)]
    assert made.report["watch_grad_norm"] == pytest.approx(1.0, abs=1e-6)


def steps_once(trial):
    """One step of -0.5, and none at all on an overflow."""
    assert weigh([ONE, INF], trial=trial).trial.trace == [0.5, 0.5]


def saves_the_scaler(trial):
    """Three applied steps from 4: doubled once to 8, one step on the way to the next
    doubling.
    """
    state = weigh([ONE] * 3, trial=trial).checkpoint.get("scaler_state_dict")
    assert state is not None
    assert (state["scale"], state["_growth_tracker"]) == (8, 1)


def updates_once_per_window(trial):
    weigh([ONE] * 2, trial=trial, aggregation_frequency=2)


@pytest.mark.parametrize(
    ("check", "planted"),
    [
        (clip_sees_unscaled_gradients, ClipsScaledGradients),
        (steps_once, StepsTwice),
        (saves_the_scaler, ForgetsTheScaler),
        (updates_once_per_window, UpdatesEveryBatch),
    ],
    ids=lambda value: value.__name__,
)
def test_famous_amp_bug_is_absent_and_its_check_would_see_it(check, planted):
    check(OneWeight)
    with pytest.raises((AssertionError, ConfigError)):
        check(planted)


class TestCheckpointOfAnotherPrecision:
    """A run that starts from the weights of another one, as a trial of its own."""

    def test_empty_scaler_state_is_accepted(self):
        """What a trial saves that wraps a disabled scaler; `load_state_dict({})` raises
        on it.
        """
        first = weigh([ONE], FP32)
        emptied = {**first.checkpoint, "scaler_state_dict": {}}
        torch.save(emptied, first.saved / "state_dict.pth")
        assert weigh([ONE], resume=first, warm_start=True).trial.scales == [4]

    def test_warm_start_uses_this_trials_scale_and_counts(self):
        """A search over init_scale from given weights must not inherit their scale."""
        amp = dataclasses.replace(AMP, init_scale=2.0**10, growth_interval=3)
        made = weigh([ONE, ONE], amp, resume=weigh([ONE] * 3), warm_start=True)
        assert made.trial.scales == [2.0**10, 2.0**10]
        assert made.report["watch_applied_steps"] == 2


def weights_after(gradients, **options):
    """The weights after each of these gradients, by SGD with momentum."""
    context: Any = Context()
    amp, weight = MixedPrecision(context, AMP), nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([weight], lr=0.5, momentum=0.5, **options)
    optimizer = context.wrap_optimizer(sgd)
    amp.on_training_start()
    weights = []
    for gradient in gradients:
        weight.grad = amp.scaler.scale(torch.full((1,), gradient))
        amp.scaler.step(optimizer)
        amp.update()
        weights.append(weight.item())
    return weights


@needs_fused
@pytest.mark.usefixtures("_deterministic")
class TestMomentumOfFusedSGD:
    """The first step of a fused SGD writes the momentum, into memory that held
    anything.
    """

    @pytest.mark.parametrize("gradients", [[1.0, 1.0], [math.inf, 1.0, math.inf, 1.0]])
    @pytest.mark.parametrize("nesterov", [False, True])
    def test_fused_momentum_is_right_after_a_first_step_that_overflows(
        self, gradients, *, nesterov
    ):
        fused = weights_after(gradients, nesterov=nesterov, fused=True)
        assert fused == weights_after(gradients, nesterov=nesterov, fused=False)
        assert all(map(math.isfinite, fused))

    @pytest.mark.parametrize("stops_after", [0, 1, 2])
    def test_fused_momentum_is_right_after_a_resume_before_the_first_applied_step(
        self, monkeypatch, stops_after
    ):
        """The first two of four steps are skipped; the momenta of the others are 1 and
        1.5.
        """
        fused = partial(torch.optim.SGD, momentum=0.5, fused=True)
        monkeypatch.setattr(torch.optim, "SGD", fused)
        rows = [INF, INF, ONE, ONE]
        first = weigh(rows, batches=stops_after) if stops_after else None
        assert weigh(rows, resume=first).trial.trace[-2:] == [0.5, -0.25]


class NotesTheLastStep(OneWeight):
    applied: tuple[bool, ...] = ()

    def train_on(self, batch):
        reported = super().train_on(batch)
        self.applied = (*self.applied, bool(self.amp.last_step_applied))
        return reported


def test_trial_is_told_whether_the_last_step_was_applied():
    assert weigh([ONE, INF, ONE], trial=NotesTheLastStep).trial.applied == (
        True,
        False,
        True,
    )


AT_IMPORT = dict(vars(torch))


class LooksAtTorch(OneWeight):
    """Notes, in every forward, which names of torch are not what they were at
    import.
    """

    def __init__(self, context, recipe):
        super().__init__(context, recipe)
        self.replaced = set()
        self.model.register_forward_hook(self.look)

    def look(self, *call):
        now = vars(torch)
        self.replaced |= {
            name for name, value in AT_IMPORT.items() if now[name] is not value
        }


def test_training_replaces_nothing_in_torch():
    assert weigh([ONE, INF], trial=LooksAtTorch).trial.replaced == set()


def test_forward_under_no_grad_leaves_the_next_one_its_gradients():
    """Up to torch 2.6 a weight cast under no_grad stays without a gradient while it is
    cached.
    """
    context: Any = Context()
    amp = MixedPrecision(
        context, AmpSettings(Precision.AMP_BF16, eval_precision=EvalPrecision.SAME)
    )
    layer = nn.Linear(1, 1, bias=False)
    with torch.no_grad(), amp.eval_autocast():
        layer(torch.ones(1, 1))
    with amp.autocast():
        loss = layer(torch.ones(1, 1)).float().mean()
    loss.backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.item() == 1
