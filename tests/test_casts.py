"""Weights that change inside one autocast region are cast anew."""

from contextlib import nullcontext

import pytest
import torch

from determined_amp.amp.rehearse.restored import undisturbed
from tests.harness import fit, same_bits
from tests.loops import one_model
from tests.trials import Converted

SIXTEEN_BITS = pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16"])
STEPS = 6


def several_steps(loop):
    return [loop.train() for _ in range(STEPS)]


def a_step_with_a_closure(loop):
    optimizer = torch.optim.LBFGS(loop.model.parameters(), lr=0.5)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = loop.loss()
        torch.autograd.backward(loss)
        losses.append(loss.item())
        return loss

    loop.amp.scaler.step(optimizer, closure)
    loop.amp.update()
    return losses


def a_loaded_state(loop):
    before = loop.loss().item()
    loop.model.load_state_dict({k: 2 * v for k, v in loop.model.state_dict().items()})
    return [before, loop.loss().item()]


def a_rehearsal_that_moves_weights(loop):
    with undisturbed(loop.model, optimizers=[loop.optimizer]):
        for parameter in loop.model.parameters():
            parameter.data.mul_(2.0)
        loop.loss()
    return [loop.loss().item()]


@pytest.mark.parametrize(
    ("train", "precision"),
    [
        (several_steps, "amp_fp16"),
        (several_steps, "amp_bf16"),
        (a_step_with_a_closure, "amp_bf16"),
        (a_loaded_state, "amp_bf16"),
        (a_rehearsal_that_moves_weights, "amp_bf16"),
    ],
)
def test_region_around_changing_weights_computes_with_the_new_ones(
    train, precision, monkeypatch
):
    with_regions_of_their_own = train(one_model(precision))
    loop = one_model(precision)
    with loop.amp.autocast():
        assert train(loop) == with_regions_of_their_own
    # The control: casts that are kept are those of old weights.
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    loop = one_model(precision)
    with loop.amp.autocast():
        assert train(loop) != with_regions_of_their_own


class StepsInOneRegion(Converted):
    """Three steps of a batch in one region, as GRPO and PPO make them."""

    is_one = True

    def train_batch(self, batch, epoch_idx, batch_idx):
        with self.amp.autocast() if self.is_one else nullcontext():
            for number in range(3):
                if number:
                    self.amp.finish_steps()
                with self.amp.autocast():
                    loss = self.loss(*batch)
                self.context.backward(self.amp.scaler.scale(loss))
                self.context.step_optimizer(self.optimizer, scaler=self.amp.scaler)
        return self.amp.update(loss)


class StepsInRegionsOfTheirOwn(StepsInOneRegion):
    is_one = False


@SIXTEEN_BITS
def test_several_steps_in_one_region_train_as_with_a_region_for_each(
    precision, monkeypatch
):
    def left(trial):
        return fit(trial, {"precision": precision}, batches=3).checkpoint[
            "models_state_dict"
        ]

    right = left(StepsInRegionsOfTheirOwn)
    assert same_bits(left(StepsInOneRegion), right)
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    assert not same_bits(left(StepsInOneRegion), right)
