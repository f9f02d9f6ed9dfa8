"""Weights that change inside one autocast region are cast anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from determined_amp.amp.rehearse.restored import undisturbed
from tests.loops import SmallLoop

STEPS = 6


def several_steps(loop: SmallLoop) -> list[float]:
    return [loop.step() for _ in range(STEPS)]


def a_step_with_a_closure(loop: SmallLoop) -> list[float]:
    optimizer = torch.optim.LBFGS(loop.model.parameters(), lr=0.5)
    losses: list[float] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loop.loss()
        torch.autograd.backward(loss)
        losses.append(loss.item())
        return loss

    loop.amp.scaler.step(optimizer, closure)
    loop.amp.update()
    return losses


def a_loaded_state(loop: SmallLoop) -> list[float]:
    before = loop.loss().item()
    loop.model.load_state_dict({k: 2 * v for k, v in loop.model.state_dict().items()})
    return [before, loop.loss().item()]


def a_rehearsal_that_moves_weights(loop: SmallLoop) -> list[float]:
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
    train: Callable[[SmallLoop], list[float]],
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_regions_of_their_own = train(SmallLoop(precision))
    loop = SmallLoop(precision)
    with loop.amp.autocast():
        assert train(loop) == with_regions_of_their_own
    # The control: casts that are kept are those of old weights.
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: None)
    loop = SmallLoop(precision)
    with loop.amp.autocast():
        assert train(loop) != with_regions_of_their_own
