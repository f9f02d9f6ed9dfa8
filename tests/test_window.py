"""`amp.window`: what is known of an optimizer, and what it needs before a step."""

import gc
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from determined_amp import AmpLoop, AmpSettings, Precision
from determined_amp.amp.counts import StepCounts
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.schedules import schedule_of
from determined_amp.amp.window import Window, fill_momentum
from tests.test_metrics import UNSCALED, count_step, having

CPU = torch.device("cpu")


def fused_sgd(dampening=0.0):
    """With the settings of a fused one; not every torch has it for a CPU."""
    made = SGD([nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.5, dampening=dampening)
    made.param_groups[0]["fused"] = True
    return made


def momenta(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    buffers = [optimizer.state[p].get("momentum_buffer") for p in parameters]
    return [None if buffer is None else buffer.tolist() for buffer in buffers]


def window_of(optimizer, *, scaled):
    counts = StepCounts(CPU, can_skip=scaled)
    return Window(optimizer, counts, CPU, scaled=scaled), optimizer


def a_window(*, scaled):
    window, _ = window_of(SGD([nn.Parameter(torch.ones(1))], lr=1.0), scaled=scaled)
    return window


class TestClip:
    """Gradients (3, 4) and 12 have the norm 13."""

    @pytest.mark.parametrize(
        ("max_norm", "left"),
        [
            (6.5, [[1.5, 2.0], [6.0]]),
            (13.5, [[3, 4], [12]]),
            (math.inf, [[3, 4], [12]]),
        ],
    )
    def test_clip_measures_the_norm_before_it_clips(self, max_norm, left):
        window = a_window(scaled=True)
        window.move("unscale")
        parameters = having(torch.tensor([3.0, 4.0]), torch.tensor([12.0]))
        without = nn.Parameter(torch.ones(1))
        window.clip([without], max_norm, lambda: torch.ones(()))
        assert (window.norms, window.largest.item()) == (0, 0)
        window.clip([without, *parameters], max_norm, lambda: torch.tensor(8.0))
        count_step(window, skipped=False)
        assert (window.norms, window.norm_sum.total().item()) == (1, 13)
        assert window.largest.item() == 12 * 8
        for parameter, values in zip(parameters, left, strict=True):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == pytest.approx(values, rel=1e-6)

    def test_norm_includes_the_gradients_of_a_sparse_embedding(self):
        """Its row 1 occurs twice in the batch, with the gradients 1 and 2."""
        window = a_window(scaled=True)
        window.move("unscale")
        rows, values = torch.tensor([[1, 1]]), torch.tensor([[1.0], [2.0]])
        twice = torch.sparse_coo_tensor(rows, values, (3, 1), check_invariants=True)
        parameters = having(twice, torch.tensor([4.0]))
        window.clip(parameters, math.inf, lambda: torch.tensor(8.0))
        count_step(window, skipped=False)
        assert (window.norms, window.norm_sum.total().item()) == (1, 5)
        assert window.largest.item() == 4 * 8

    @pytest.mark.parametrize(("scaled", "total"), [(True, 5.0), (False, math.inf)])
    def test_norm_that_is_not_finite_is_left_out_only_where_its_step_is_skipped(
        self, total, *, scaled
    ):
        """Finite gradients, too large for their norm: without a scale the clip makes
        them 0.
        """
        window = a_window(scaled=scaled)
        for values in ([3.0, 4.0], [1.0e30, 1.0e30]):
            window.move("unscale")
            window.clip(having(torch.tensor(values)), 1.0, lambda: torch.ones(()))
            count_step(window, skipped=False)
        assert window.norm_sum.total().item() == total


def test_optimizer_has_a_gradient_if_any_group_has_one():
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    groups = [{"params": [first]}, {"params": [second]}]
    window, _ = window_of(SGD(groups, lr=1.0), scaled=True)
    assert not window.has_gradient()
    second.grad = torch.zeros(2)
    assert window.has_gradient()


class TestMeasure:
    def test_largest_gradient_of_a_report_is_kept(self):
        window = a_window(scaled=True)
        for gradient, largest in (
            (math.inf, 0),
            (math.nan, 0),
            (2.0, 2),
            (-5.0, 5),
            (3.0, 5),
        ):
            window.measure(
                having(torch.tensor([gradient, 0.5]), torch.empty(0)), UNSCALED
            )
            assert window.largest.item() == largest

    @pytest.mark.parametrize(
        ("scaled", "attempted", "largest"),
        [(True, 10, 1.0), (True, 11, 0.0), (False, 10, 0.0)],
    )
    def test_gradients_of_every_tenth_step_are_measured_with_a_loss_scale(
        self, attempted, largest, *, scaled
    ):
        window = a_window(scaled=scaled)
        window.counts.attempted = attempted
        window.measure(having(torch.ones(1)), UNSCALED)
        assert window.largest.item() == largest


class TestBegin:
    def test_momentum_is_filled_in_groups_that_came_later_too(self):
        window, optimizer = window_of(fused_sgd(), scaled=True)
        window.prepare()
        assert momenta(optimizer) == [[0, 0]]
        optimizer.state.clear()
        window.see_step(optimizer)
        assert momenta(optimizer) == [None]  # nothing has changed
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(1))], "fused": True}
        )
        window.see_step(optimizer)
        assert momenta(optimizer) == [[0, 0], [0]]

    def test_first_step_alone_takes_the_rate_from_the_schedule(self):
        window, optimizer = window_of(fused_sgd(), scaled=False)
        window.schedule = schedule_of(
            lr_scheduler.StepLR(optimizer, 1, 0.5), CPU, skips=False
        )
        assert window.is_scheduled
        for rate, group in ((77.0, 0.5), (66.0, 66.0)):
            optimizer.param_groups[0]["lr"] = rate
            window.prepare()
            assert optimizer.param_groups[0]["lr"] == group


class TestFillMomentum:
    def test_momentum_is_filled_in_each_group_that_has_none(self):
        optimizer = fused_sgd()
        (weight,) = optimizer.param_groups[0]["params"]
        optimizer.state[weight]["momentum_buffer"] = torch.full((2,), 3.0)
        for settings in ({"fused": False}, {"dampening": 0.25}, {"momentum": 0.0}, {}):
            later = {"params": [nn.Parameter(torch.ones(1))], "fused": True, **settings}
            optimizer.add_param_group(later)
        fill_momentum(optimizer, can_skip=False)
        assert momenta(optimizer) == [[3, 3], None, None, None, [0]]

    @pytest.mark.filterwarnings("ignore:Lazy modules")  # of torch 2.3
    def test_momentum_of_a_lazy_parameter_is_filled_once_its_size_is_known(self):
        model, known = nn.LazyLinear(1), nn.Parameter(torch.ones(1))
        optimizer = SGD([*model.parameters(), known], lr=0.5, momentum=0.5)
        optimizer.param_groups[0]["fused"] = True
        window, _ = window_of(optimizer, scaled=True)
        window.prepare()
        assert momenta(optimizer) == [None, None, [0]]
        model(torch.ones(1, 2))
        window.see_step(optimizer)
        assert momenta(optimizer) == [[[0, 0]], [0], [0]]

    def test_fused_momentum_with_dampening_is_refused_if_steps_can_be_skipped(self):
        optimizer = fused_sgd(dampening=0.25)
        with pytest.raises(
            ConfigError, match=r"^SGD: got fused and dampening 0\.25, which goes"
        ):
            fill_momentum(optimizer, can_skip=True)
        fill_momentum(optimizer, can_skip=False)
        assert momenta(optimizer) == [None]


class Wrapper(torch.optim.Optimizer):
    """Never calls `Optimizer.__init__`."""

    def __init__(self):
        self.stepped = []
        self.param_groups = []

    def step(self, closure=None, *, twice=False):
        """Its own."""
        self.stepped.append((closure, twice))
        return "stepped"


def test_each_step_of_a_wrapper_without_hooks_is_refused_until_its_loop_is_over():
    wrapper = Wrapper()
    amp = AmpLoop(AmpSettings(Precision.FP32, set_backends=False), "cpu")
    amp.wrap_optimizer(wrapper)
    assert wrapper.step.__doc__ == "Its own."
    result: Any = amp.scaler.step(wrapper, None, twice=True)
    assert result == "stepped"
    for _ in range(2):
        with pytest.raises(ConfigError, match="it steps an optimizer"):
            wrapper.step()
    assert wrapper.stepped == [(None, True)]
    del amp
    gc.collect()
    assert wrapper.step() == "stepped"
