"""Running statistics that are not finite go back to those of the last report."""

import copy
import math

import pytest
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


def overflow(layer):
    layer(torch.tensor([[1.0, math.inf], [3.0, 5.0]]))


@pytest.mark.parametrize("has_report", [False, True])
def test_statistics_of_a_state_that_was_assigned_go_back_too(has_report):
    model = nn.Sequential(nn.BatchNorm1d(2))
    statistics = RunningStatistics([model])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    if has_report:
        statistics.repair()
    overflow(model[0])
    statistics.repair()
    assert model[0].get_buffer("running_mean").tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:Lazy modules")  # of torch 2.3
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(2), nn.LazyBatchNorm1d])
def test_statistics_of_a_layer_that_came_or_got_its_size_later_go_back_too(make):
    models, layer = [nn.Sequential(nn.LazyBatchNorm1d())], make()
    statistics = RunningStatistics(models)
    models.append(nn.Sequential(layer))
    layer(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))
    statistics.repair()
    good = layer.get_buffer("running_mean").clone()
    overflow(layer)
    statistics.repair()
    assert good.all()
    assert torch.equal(layer.get_buffer("running_mean"), good)
    models[-1] = nn.Sequential(nn.BatchNorm1d(3))  # of another width
    statistics.repair()
    assert models[-1][0].get_buffer("running_mean").tolist() == [0.0] * 3
