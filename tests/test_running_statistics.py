"""Running statistics that are not finite go back to those of the last report."""

import copy
import math

import torch
from torch import nn

from determined_amp.amp.running_statistics import RunningStatistics
from tests.harness import same_bits


def test_poisoned_statistics_go_back_to_the_last_report(caplog):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    statistics = RunningStatistics([model])
    model(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
    statistics.repair()
    mean = model[0].get_buffer("running_mean")
    good = mean.clone()
    assert good.all()
    model(torch.tensor([[1.0, math.inf], [3.0, 5.0]]))
    assert not mean.isfinite().all()
    statistics.repair()
    assert torch.equal(mean, good)
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    assert "put back" in caplog.text


def test_sound_statistics_and_masks_of_infinity_are_left_alone(caplog):
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    statistics = RunningStatistics([model])
    model(torch.ones(4, 2))
    before = copy.deepcopy(model.state_dict())
    statistics.repair()
    assert same_bits(model.state_dict(), before)
    assert not caplog.text
