"""Gradients that somebody changes while they are scaled: clips are refused, others warn
once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

from determined_amp import AmpLoop, AmpSettings, ConfigError, Precision
from determined_amp.amp import torch_private
from tests.harness import fit
from tests.loops import SmallLoop
from tests.trials import Converted

Change = Callable[[nn.Module], object]
WARNING = "scaled gradients were changed between their backward and this step"


def nothing(model: nn.Module) -> None:
    pass


def by_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1.0)


def by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 1.0)


def of_the_last_layer(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1.0, foreach=False)


def of_one_tensor(model: Any) -> None:
    clip_grad.clip_grad_norm_(model[0].weight, 1.0)


CLIPS = [by_norm, by_value, of_the_last_layer, of_one_tensor]


def multiplied(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def replaced(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-1, 1)


def all_at_once(model: nn.Module) -> None:
    torch._foreach_clamp_max_(
        [p.grad for p in model.parameters() if p.grad is not None], 1.0
    )


def of_one_bias(model: Any) -> None:
    model[2].bias.grad.clamp_(-1, 1)


def train(
    change: Change,
    precision: str,
    window: int,
    *,
    unscales: bool = False,
    steps: int = 6,
) -> None:
    """Steps of a small net, whose gradients are changed before each of them."""
    loop = SmallLoop(precision)
    for batch in range(steps * window):
        loss = loop.loss() / window
        torch.autograd.backward(loop.amp.scaler.scale(loss))
        if batch % window == window - 1:
            if unscales:
                loop.amp.scaler.unscale_(loop.optimizer)
            change(loop.model)
            loop.amp.scaler.step(loop.optimizer)
            loop.optimizer.zero_grad()
        loop.amp.update(loss)


WINDOWS = pytest.mark.parametrize("window", [1, 2])


@WINDOWS
@pytest.mark.parametrize("clip", CLIPS)
def test_clip_of_scaled_gradients_is_refused_where_it_is_called(
    clip: Change, window: int
) -> None:
    words = (
        r"^the loop: it clips gradients that are still scaled; allowed:"
        r" amp\.clip_gradients"
    )
    with pytest.raises(ConfigError, match=words) as refused:
        train(clip, "amp_fp16", window)
    assert any(entry.name == clip.__name__ for entry in refused.traceback)


@WINDOWS
@pytest.mark.parametrize("change", [multiplied, replaced, all_at_once, of_one_bias])
@pytest.mark.parametrize("steps", [1, 6])
def test_other_change_of_scaled_gradients_warns_once_with_the_line_of_the_step(
    change: Change, window: int, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    train(change, "amp_fp16", window, steps=steps)
    (line,) = (line for line in caplog.messages if WARNING in line)
    source, number, _ = line.split(":", 2)
    assert source == __file__
    assert "amp.scaler.step(" in Path(source).read_text().splitlines()[int(number) - 1]


def test_change_that_begins_late_warns(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[nn.Module] = []

    def late(model: nn.Module) -> None:
        calls.append(model)
        if len(calls) > 15:
            multiplied(model)

    train(late, "amp_fp16", 2, steps=15)
    assert WARNING not in caplog.text
    calls.clear()
    train(late, "amp_fp16", 2, steps=25)
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize("change", [nothing, multiplied, *CLIPS])
@pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
def test_change_of_unscaled_gradients_is_allowed(
    change: Change, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(change, precision, 1, unscales=True)
    assert WARNING not in caplog.text
    if precision != "amp_fp16":
        train(change, precision, 1)
        assert WARNING not in caplog.text


def test_clip_of_another_model_is_allowed() -> None:
    other = nn.Linear(2, 2)

    def clip_the_other(model: nn.Module) -> None:
        other(torch.ones(1, 2)).sum().backward()
        clip_grad_norm_(other.parameters(), 1.0)

    train(clip_the_other, "amp_fp16", 1)


def test_torch_is_left_as_it_was_after_each_step() -> None:
    gc.collect()  # loops of other tests that stopped between a backward and its step
    train(nothing, "amp_fp16", 1)
    now = vars(clip_grad)["_group_tensors_by_device_and_dtype"]
    assert now is torch_private.sort_gradients


def test_torch_is_as_before_after_a_training_ends_between_backward_and_step() -> None:
    amp = AmpLoop(AmpSettings(Precision.AMP_FP16), "cpu")
    model = amp.prepare(nn.Linear(1, 1))
    amp.scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    assert (
        vars(clip_grad)["_group_tensors_by_device_and_dtype"]
        is not torch_private.sort_gradients
    )
    del amp
    gc.collect()
    clip_grad_norm_(model.parameters(), 1.0)
    assert (
        vars(clip_grad)["_group_tensors_by_device_and_dtype"]
        is torch_private.sort_gradients
    )


class Clips(Converted):
    """Between the backward and the step, as in a loop without AMP."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        with self.amp.autocast():
            loss = self.loss(batch)
        self.context.backward(self.amp.scaler.scale(loss))
        self.change()
        self.context.step_optimizer(self.optimizer, scaler=self.amp.scaler)
        return self.amp.update(loss)

    def change(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0)


class Halves(Clips):
    def change(self) -> None:
        multiplied(self.model)


class LeavesAlone(Clips):
    def change(self) -> None:
        pass


@pytest.mark.parametrize("window", [1, 4])
def test_trial_may_not_clip_scaled_gradients_and_is_told_of_other_changes(
    window: int, caplog: pytest.LogCaptureFixture
) -> None:
    def train_trial(trial: type[Clips]) -> None:
        fp16 = {"precision": "amp_fp16", "init_scale": 64.0}
        fit(trial, fp16, batches=3 * window, aggregation_frequency=window)

    with pytest.raises(
        ConfigError, match="it clips gradients that are still scaled; allowed: cl"
    ):
        train_trial(Clips)
    train_trial(LeavesAlone)  # the division by the window is the library's
    assert WARNING not in caplog.text
    train_trial(Halves)
    assert caplog.text.count(WARNING) == 1
