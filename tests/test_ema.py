"""`trials.ema`: the average follows applied steps, on the device, and never touches the
weights.
"""

import copy
from typing import Any

import pytest
import torch
from diffusers.training_utils import EMAModel
from torch import nn

from determined_amp import MixedPrecision
from tests.harness import Context
from tests.trials import AMP, OneWeight, weigh
from trials.ema import EMAWeights

DECAY, INF = 0.9, float("inf")


class Averaged(OneWeight):
    """The one-weight trial with an average; its weight is 1 - (sum of x) / 2.

    Attributes:
        averages: The averaged weight after every batch.
    """

    def __init__(self, context, *given):
        super().__init__(context, *given)
        self.ema = EMAWeights(self.model, self.amp, DECAY)
        self.averages = []

    def train_batch(self, batch, epoch_idx, batch_idx):
        reported = super().train_batch(batch, epoch_idx, batch_idx)
        self.ema.step()
        (average,) = self.ema.state_dict().values()
        self.averages.append(float(average))
        return reported

    def build_callbacks(self):
        return {**super().build_callbacks(), "ema": self.ema}


def averages_of(weights):
    """What diffusers' own `EMAModel` makes of these weights, one step each."""
    parameter = nn.Parameter(torch.ones(1, 1))
    average = EMAModel([parameter], decay=DECAY)
    made = []
    for weight in weights:
        nn.init.constant_(parameter, weight)
        average.step([parameter])
        made.append(float(average.shadow_params[0]))
    return pytest.approx(made, rel=1.0e-6)


def averaged(*models):
    """Mixed precision of some models, an optimizer for each, and their averages."""
    context: Any = Context()
    amp = MixedPrecision(context, AMP)
    optimizers = [
        context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        for model in models
    ]
    # By default an average follows the first optimizer of the trial.
    others = zip(models[1:], optimizers[1:], strict=True)
    averages = [
        EMAWeights(models[0], amp, DECAY),
        *(EMAWeights(m, amp, DECAY, o) for m, o in others),
    ]
    amp.on_training_start()
    return amp, optimizers, averages


def step(amp, optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    amp.scaler.scale(torch.ones(()))
    amp.scaler.step(optimizer)
    amp.update()


class TestAverage:
    def test_skipped_step_moves_neither_the_average_nor_its_warm_up(self):
        trial = weigh(
            [[1.0], [2.0], [INF], [0.5], [INF], [INF], [1.0]], trial=Averaged
        ).trial
        assert trial.averages[2] == trial.averages[1]
        assert trial.averages[4:6] == [trial.averages[3]] * 2
        applied = [0, 1, 3, 6]
        expected = averages_of([trial.trace[batch] for batch in applied])
        assert [trial.averages[batch] for batch in applied] == expected
        # Negative control: diffusers' own moves at every step, and ends elsewhere.
        assert [trial.averages[batch] for batch in range(7)] != averages_of(trial.trace)

    def test_average_follows_the_optimizer_that_steps_its_model(self):
        """Two optimizers, a step of the second: the average of the first's model
        stays.
        """
        models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        amp, optimizers, averages = averaged(*models)
        before = copy.deepcopy(averages[0].state_dict())
        for model in models:
            nn.init.constant_(model.weight, 7.0)
        step(amp, optimizers[1])
        for average in averages:
            average.step()
        assert averages[0].state_dict()["weight"].item() == before["weight"].item()
        # the first step is a copy
        assert averages[1].state_dict()["weight"].item() == 7.0

    def test_average_survives_a_checkpoint(self):
        first = weigh([[1.0], [2.0], [0.5]], trial=Averaged)
        saved = first.checkpoint["callbacks"]["ema"]
        assert [(key, float(value)) for key, value in saved.items()] == [
            ("weight", first.trial.averages[-1])
        ]
        # The steps that another trial applied are none of this one's: its first step is
        # a copy.
        second = weigh(
            [[INF], [1.0]], trial=Averaged, resume=first, warm_start=True
        ).trial
        assert second.averages[0] == first.trial.averages[-1]
        assert second.averages[1] == second.trace[1]
