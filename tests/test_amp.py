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

from determined_amp import MixedPrecision
from determined_amp.amp.settings import AmpSettings, EvalPrecision, Precision
from tests.harness import Context, needs_fused
from tests.trials import AMP, BF16, FP32, INF, ONE, weigh

without_a_scale = pytest.mark.parametrize(
    "amp", [FP32, BF16], ids=lambda amp: amp.precision.value
)


@without_a_scale
def test_checkpoint_of_a_precision_without_a_loss_scale_holds_no_scaler(amp):
    """A disabled scaler would be saved as {} and crash a later resume in amp_fp16."""
    made = weigh([ONE, ONE], amp)
    assert "scaler_state_dict" not in made.checkpoint
    assert not {"loss_scale_log2", "skipped_steps"} & made.report.keys()


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
