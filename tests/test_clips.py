"""Clips by torch of gradients that are still scaled: they are refused."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

from determined_amp import ConfigError, check
from determined_amp.amp import torch_private
from determined_amp.check.recorder import Recorder
from tests.loops import one_model


def by_norm(model):
    clip_grad_norm_(model.parameters(), 1.0)


def by_value(model):
    clip_grad_value_(model.parameters(), 1.0)


def of_the_last_layer(model):
    torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1.0, foreach=False)


def of_one_tensor(model):
    clip_grad.clip_grad_norm_(model[0].weight, 1.0)


def by_a_known_norm(model):
    gradients = [p.grad for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)


CLIPS = [by_norm, by_value, of_the_last_layer, of_one_tensor]
if hasattr(torch.nn.utils, "clip_grads_with_norm_"):  # not in torch 2.3
    CLIPS.append(by_a_known_norm)


def train(change, precision, window, *, unscales=False, steps=6):
    """Steps of a small net, whose gradients are changed before each of them."""
    loop = one_model(precision)
    for batch in range(steps * window):
        loss = loop.loss() / window
        torch.autograd.backward(loop.amp.scaler.scale(loss))
        if batch % window == window - 1:
            if unscales:
                loop.amp.scaler.unscale_(loop.optimizer)
            change(loop.model)
            loop.step()
            loop.optimizer.zero_grad()
        loop.amp.update(loss)


WINDOWS = pytest.mark.parametrize("window", [1, 2])


@WINDOWS
@pytest.mark.parametrize("clip", CLIPS)
def test_clip_of_scaled_gradients_is_refused_where_it_is_called(clip, window):
    words = (
        r"^the loop: it clips gradients that are still scaled; allowed:"
        r" amp\.clip_gradients"
    )
    with pytest.raises(ConfigError, match=words) as refused:
        train(clip, "amp_fp16", window)
    assert any(entry.name == clip.__name__ for entry in refused.traceback)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
def test_clip_of_unscaled_gradients_is_allowed(clip, precision):
    train(clip, precision, 1, unscales=True)
    if precision != "amp_fp16":
        train(clip, precision, 1)


def test_clip_of_another_model_is_allowed():
    other = nn.Linear(2, 2)

    def clip_the_other(model):
        other(torch.ones(1, 2)).sum().backward()
        clip_grad_norm_(other.parameters(), 1.0)

    train(clip_the_other, "amp_fp16", 1)


def sorts_as_torch_does():
    now = vars(clip_grad)["_group_tensors_by_device_and_dtype"]
    return now is torch_private.group_gradients


def test_torch_is_as_it_was_once_a_training_and_a_doctor_are_over():
    gc.collect()  # trials of other tests
    assert sorts_as_torch_does()
    loop = one_model()
    torch.autograd.backward(loop.amp.scaler.scale(loop.loss()))
    assert not sorts_as_torch_does()
    with check.watching():
        del loop
        assert not sorts_as_torch_does()
    assert sorts_as_torch_does()


def test_doctor_hears_of_the_clips_of_a_loop_that_are_not_refused():
    recorder = Recorder()
    with recorder.watching():
        train(by_norm, "amp_fp16", 1, unscales=True, steps=4)
        assert [clip.limit for clip in recorder.record.of("clip")] == [1.0] * 4
        with pytest.raises(ConfigError, match="clips gradients that are still"):
            train(by_norm, "amp_fp16", 1)
    assert len(recorder.record.of("clip")) == 4
