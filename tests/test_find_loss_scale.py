"""`find_loss_scale`: the finder for a model, a loss and some batches, without a
trial.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from determined_amp import ConfigError
from determined_amp.finder import find_loss_scale
from determined_amp.finder.model import _moved
from determined_amp.finder.prediction import LossScaleError


class Classifier(nn.Module):
    """Called and answering as the models of Hugging Face are."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, 4),
        )
        self.gain = gain

    def forward(self, inputs, labels):
        logits = self.layers(inputs)
        return {
            "loss": self.gain * functional.cross_entropy(logits, labels),
            "logits": logits,
        }


def model(gain=1.0):
    torch.manual_seed(0)
    return Classifier(gain)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "inputs": torch.randn(8, 16, generator=generator),
            "labels": torch.randint(0, 4, (8,), generator=generator),
        }
        for _ in range(2)
    ]


class Pair(NamedTuple):
    inputs: torch.Tensor
    labels: OrderedDict[str, torch.Tensor]


def test_tensors_in_any_container_are_moved_to_the_device():
    rows = torch.ones(2)
    batch = [Pair(rows, OrderedDict(labels=rows)), "text", 3]
    (moved,) = _moved([batch], torch.device("meta"))
    (pair, *others) = moved
    assert (type(pair), type(pair.labels), others) == (Pair, OrderedDict, ["text", 3])
    assert pair.inputs.is_meta
    assert pair.labels["labels"].is_meta
    assert not rows.is_meta


def loss_of(net):
    def loss(batch):
        answer = net(**batch)
        return answer["loss"]

    return loss


class TestAnswer:
    def test_answer_prints_as_on_the_command_line(self):
        net = model(gain=1000.0)
        found = find_loss_scale(net, loss_of(net), batches(), init_scale=2.0**20)
        text = str(found)
        assert text.startswith("Classifier: 2 batches, 16 samples, on ")
        assert "from 2^16, 9 steps are skipped" in text
        assert f"torch.amp.GradScaler(..., init_scale={found.init_scale})" in text

    def test_model_in_evaluation_mode_is_measured_in_training_mode_and_put_back(self):
        net = model().eval()
        net.layers[4].train()
        seen = []

        def loss(batch):
            seen.append(net.layers[1].training)
            return loss_of(net)(batch)

        find_loss_scale(net, loss, batches())
        assert set(seen) == {True}
        assert [layer.training for layer in net.layers] == [False] * 4 + [True]


class TestErrors:
    @pytest.mark.parametrize(
        ("returned", "said"),
        [
            (lambda net, batch: net(**batch), "loss_fn: returned a dict"),
            (lambda net, batch: net(**batch)["logits"], r"a tensor of shape \(8, 4\)"),
            (lambda net, batch: net(**batch)["loss"].detach(), "without a gradient"),
        ],
        ids=["a dict", "logits", "no gradient"],
    )
    def test_loss_function_that_returns_no_loss_is_refused(self, returned, said):
        net = model()
        with pytest.raises(ConfigError, match=said):
            find_loss_scale(net, lambda batch: returned(net, batch), batches())

    @pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
    def test_impossible_init_scale_and_an_empty_list_of_batches_are_refused(
        self, scale
    ):
        net = model()
        with pytest.raises(LossScaleError, match="init_scale: got"):
            find_loss_scale(net, loss_of(net), batches(), init_scale=scale)
        with pytest.raises(LossScaleError, match="batches: got none"):
            find_loss_scale(net, loss_of(net), [])
