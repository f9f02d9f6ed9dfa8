"""`amp.scaler`: who was stepped and who skipped; counts on the host and on the
device.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import determined_amp
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.mistakes import (
    AWAITS_UPDATE,
    HAS_STEPPED,
    IN_A_LOOP,
    IN_A_TRIAL,
    TRANSITIONS,
    Call,
    Mistake,
    Stage,
)
from determined_amp.amp.scaler import LossScaler
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.amp.window import RUNNING, Windows
from tests.loops import ReadsFoundInf


def scaler_of(settings):
    windows = Windows(torch.device("cpu"), scaled=settings.scales_the_loss)
    return LossScaler(settings, "cpu", windows)


class Stepped:
    """A weight of 1, moved at rate 1 by a scaler whose first scale is 4."""

    def __init__(self, optimizer_class=torch.optim.SGD, **settings):
        given = {"init_scale": 4.0, **settings}
        self.scaler = scaler_of(AmpSettings(Precision.AMP_FP16, **given))
        self.optimizer = self.another(optimizer_class)

    def another(self, optimizer_class=torch.optim.SGD):
        """One more optimizer, with a weight of its own."""
        made = optimizer_class([nn.Parameter(torch.ones(1))], lr=1.0)
        made.register_step_pre_hook(self.sees_step)
        return made

    def sees_step(self, optimizer, *call):
        if RUNNING.window is not None:
            RUNNING.window.see_step(optimizer)

    @property
    def window(self):
        return self.scaler.windows[self.optimizer]

    def outcomes(self):
        """Whether each step was skipped that is not counted yet."""
        windows = self.scaler.windows.items()
        return {o: w.skipped for o, w in windows if w.stage in HAS_STEPPED}

    def backward(self, gradient, optimizer=None):
        weight = (optimizer or self.optimizer).param_groups[0]["params"][0]
        weight.grad = self.scaler.scale(torch.full((1,), gradient))
        return weight

    def step(self, gradient, optimizer=None):
        """The weight after a step."""
        weight = self.backward(gradient, optimizer)
        self.scaler.step(optimizer or self.optimizer)
        return weight.item()

    def step_and_update(self, gradient):
        """The scale after a step and an update."""
        self.step(gradient)
        self.scaler.finish()
        return float(self.scaler.get_scale())


class TestSettings:
    def test_default_settings_of_the_scaler_are_torchs(self):
        ours = scaler_of(AmpSettings(Precision.AMP_FP16))
        theirs = torch.amp.GradScaler("cpu")
        assert ours.state_dict() == theirs.state_dict() != {}


class TestStep:
    @pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, ReadsFoundInf])
    def test_step_that_is_applied_or_skipped_is_noted(self, optimizer_class):
        made = Stepped(optimizer_class)
        assert made.step(0.25) == 0.75
        (outcome,) = made.outcomes().values()
        made.scaler.finish()
        assert outcome == 0
        assert isinstance(outcome, torch.Tensor) is (optimizer_class is ReadsFoundInf)
        assert made.step(math.inf) == 0.75
        assert made.outcomes() == {made.optimizer: 1}

    def test_step_that_raises_has_ended_and_is_not_noted(self):
        made = Stepped()
        seen = []

        def fails(*call):
            seen.append(RUNNING.window)
            raise ZeroDivisionError

        made.optimizer.register_step_pre_hook(fails)
        assert RUNNING.window is None
        with pytest.raises(ZeroDivisionError):
            made.step(1.0)
        assert (seen, RUNNING.window) == ([made.window], None)
        assert made.outcomes() == {}
        made.window.move("end_batch")

    def test_step_without_any_gradient_is_applied_and_moves_nothing(self):
        """Torch itself refuses it."""
        made = Stepped()
        settings = AmpSettings(Precision.AMP_FP16, init_scale=4.0, growth_interval=1)
        made.scaler = scaler_of(settings)
        made.scaler.scale(torch.ones(()))
        made.scaler.step(made.optimizer)
        assert made.outcomes() == {made.optimizer: False}
        made.scaler.finish()
        assert made.scaler.get_scale() == 8


def reach(made, stage):
    """Bring the optimizer there by what a training calls."""
    weight = made.backward(1.0)
    if stage in (Stage.UNSCALED, Stage.DROPPED):
        made.scaler.unscale_(made.optimizer)
    if stage is Stage.DROPPED:
        weight.grad = None
        made.backward(1.0)
    if stage in HAS_STEPPED:
        made.scaler.step(made.optimizer)
    if stage is Stage.UPDATED:
        made.scaler.update()


# What a training calls, with what it asks of the window in turn.
CALLS: dict[Callable[[Any], Any], tuple[Call, ...]] = {
    lambda made: made.scaler.unscale_(made.optimizer): ("unscale",),
    lambda made: made.window.move("clip"): ("clip",),
    lambda made: made.scaler.step(made.optimizer): ("begin_step", "step"),
    lambda made: made.scaler.update(): ("update",),
    lambda made: made.window.move("end_batch"): ("end_batch",),
}


class TestStages:
    @pytest.mark.parametrize("precision", [Precision.AMP_FP16, Precision.FP32])
    @pytest.mark.parametrize("stage", Stage)
    @pytest.mark.parametrize("call", CALLS)
    def test_call_in_a_stage_does_what_the_table_of_stages_says(
        self, precision, stage, call
    ):
        made = Stepped()
        if precision is Precision.FP32:
            made.scaler = scaler_of(AmpSettings(precision))
        reach(made, stage)
        assert made.window.stage is stage
        after = stage
        for each in CALLS[call]:
            after = TRANSITIONS[after].get(each, after)
            if isinstance(after, Mistake):
                with pytest.raises(ConfigError, match=re.escape(after.value)):
                    call(made)
                assert made.window.stage is stage
                return
        scales = precision is Precision.AMP_FP16
        if scales and stage is Stage.UNSCALED and CALLS[call] == ("unscale",):
            with pytest.raises(RuntimeError, match="unscale_"):  # torch's own
                call(made)
        elif scales and stage not in AWAITS_UPDATE and CALLS[call] == ("update",):
            with pytest.raises(AssertionError, match="No inf checks"):  # torch's own
                call(made)
        else:
            call(made)
        assert made.window.stage is after

    def test_update_and_finish_end_every_stage(self):
        made = Stepped()
        made.backward(1.0)
        made.scaler.unscale_(made.optimizer)
        made.step(1.0, made.another())
        made.scaler.update()
        assert made.window.stage is Stage.SCALED
        assert len(made.outcomes()) == 1
        made.scaler.finish()
        assert {each.stage for each in made.scaler.windows.values()} == {Stage.SCALED}
        made.step(1.0)

    def test_each_mistake_has_words_and_all_but_one_a_remedy(self):
        assert (
            IN_A_LOOP.remedies.keys()
            == IN_A_TRIAL.remedies.keys()
            == {*Mistake} - {Mistake.UPDATES_NOTHING}
        )
        assert "amp.update" in Mistake.UPDATES_NOTHING.value

    def test_window_alone_writes_its_stage(self):
        package = Path(determined_amp.__file__).parent
        writers = {
            path.name
            for path in package.rglob("*.py")
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr in ("stage", "gradients_used")
        }
        assert writers == {"window.py"}


class TestUpdate:
    def test_update_takes_the_scale_no_further_than_its_floor(self):
        made = Stepped(min_scale=1.5)
        assert [made.step_and_update(math.inf) for _ in range(3)] == [2.0, 1.5, 1.5]
        made.scaler.update(8.0)
        assert made.scaler.get_scale() == 8
        made.scaler.update(torch.tensor(1.0))
        assert made.scaler.get_scale() == 1.5

    def test_update_keeps_the_scale_of_the_newest_step(self):
        made = Stepped(growth_interval=1)
        assert [*made.scaler.loss_scales()] == [4, 4]
        found = []
        for gradient in (1.0, math.inf, 1.0):
            made.step_and_update(gradient)
            found.append(tuple(map(float, made.scaler.loss_scales())))
        assert found == [(8, 4), (4, 8), (8, 4)]


@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_beside_a_closure_reach_the_step(*, by_name):
    class Takes(torch.optim.SGD):
        def step(self, closure=None, *, extra=0):
            return closure() + extra

    made = Stepped(Takes)
    made.scaler = scaler_of(AmpSettings(Precision.AMP_BF16))
    given = {"closure": lambda: 2.0} if by_name else {}
    args = () if by_name else (lambda: 2.0,)
    assert made.scaler.step(made.optimizer, *args, extra=5, **given) == 7


def test_step_inside_the_closure_of_another_one_is_told_from_it():
    outer, inner = Stepped(), Stepped()
    outer.scaler = scaler_of(AmpSettings(Precision.FP32))

    def closure():
        inner.step(math.inf)
        assert RUNNING.window is outer.window

    outer.scaler.step(outer.optimizer, closure)
    assert outer.outcomes() == {outer.optimizer: False}
    assert inner.outcomes() == {inner.optimizer: True}
    assert RUNNING.window is None
