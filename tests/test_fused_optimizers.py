"""Which optimizers of unmodified trials are made fused; they step as before."""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from torch import nn

from determined_amp import MixedPrecision
from determined_amp.trial.unmodified.calls import fuse
from tests import habits
from tests.harness import fit_as_it_is, needs_fused


@pytest.fixture
def _fused_as_on_a_gpu(monkeypatch):
    make = MixedPrecision.__init__

    def make_fused(amp, *given):
        make(amp, *given)
        amp.fused = True

    monkeypatch.setattr(MixedPrecision, "__init__", make_fused)


@needs_fused
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize(
    ("trial", "is_fused"),
    [(habits.Habit, True), (habits.SparseEmbedding, False)],
    ids=["dense gradients", "sparse gradients"],
)
def test_optimizer_is_made_fused_where_it_can_be_and_trains_as_before(
    request, trial, *, is_fused
):
    """Up to the rounding of 8 steps; one that does not clip moves by fifty times as
    much.
    """

    def trained_weights():
        torch.manual_seed(1)
        made = fit_as_it_is(trial, {"precision": "amp_fp16", "audit": False})
        weights = [p.detach().flatten() for p in made.trial.model.parameters()]
        return torch.cat(weights), made.trial.optimizer.defaults["fused"]

    plain, fused = trained_weights()
    assert not fused
    request.getfixturevalue("_fused_as_on_a_gpu")
    weights, fused = trained_weights()
    assert bool(fused) is is_fused
    torch.testing.assert_close(weights, plain, rtol=1e-5, atol=1e-6)


def has_a_step_of_its_own(parameters):
    """And a scheduler of torch has wrapped it."""
    sgd = torch.optim.SGD(parameters, lr=0.1)
    sgd.step = MethodType(lambda optimizer: None, sgd)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(sgd, 100)
    return sgd


class TestFused:
    @needs_fused
    @pytest.mark.parametrize(
        "make",
        [
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
            partial(torch.optim.Adam, lr=0.1, amsgrad=True),
            partial(torch.optim.AdamW, lr=0.1),
        ],
        ids=["SGD", "Adam", "AdamW"],
    )
    def test_optimizer_that_is_fused_later_steps_as_one_that_was_made_fused(self, make):
        weights = []
        for fused in (True, None):
            weight = nn.Parameter(torch.linspace(-1, 1, 5))
            optimizer = make([weight], fused=fused)
            assert fuse(optimizer)
            # otherwise the scaler waits for the device
            assert optimizer._step_supports_amp_scaling
            assert not optimizer.defaults["foreach"]
            assert fuse(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for factor in (1.0, float("inf"), 2.0):
                scaler.scale((weight * torch.arange(5.0)).sum() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            weights.append(weight.detach())
        assert torch.equal(*weights)

    @pytest.mark.parametrize(
        "optimizer",
        [
            partial(torch.optim.RMSprop),
            partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
            partial(torch.optim.AdamW, foreach=True),
            partial(torch.optim.AdamW, differentiable=True),
            has_a_step_of_its_own,
        ],
        ids=[
            "no fused kernel",
            "dampening",
            "foreach",
            "differentiable",
            "a step of its own",
        ],
    )
    def test_optimizer_that_cannot_be_fused_keeps_its_settings(self, optimizer):
        made = optimizer([nn.Parameter(torch.ones(1))])
        before = copy.deepcopy(made.defaults)
        assert not fuse(made)
        assert made.defaults == before
