"""Validation reports exact means over samples, whatever the batches and slots."""

import math
from typing import Any

import pytest
import torch

from determined_amp.amp.settings import AmpSettings, EvalPrecision, Precision
from determined_amp.trial.mixed_precision import MixedPrecision
from tests.harness import Context
from trials.mean_metrics import MeanMetrics
from trials.mlp import MLPTrial


def classifier(settings):
    """As much of the trial as `evaluate_batch` needs; its logits are the batch
    itself.
    """
    context: Any = Context()
    trial = MLPTrial.__new__(MLPTrial)
    trial.amp, trial.means = MixedPrecision(context, settings), MeanMetrics(context)
    trial.model = torch.nn.Identity()
    return trial


def reported(*trials):
    slots = [trial.means.per_slot_reduce() for trial in trials]
    return trials[0].means.cross_slot_reduce(slots)


def test_means_are_reduced_in_validation_only():
    context: Any = Context()
    mean = MeanMetrics(context)
    assert context.registered == [(mean, {"for_training": False})]


class TestClassification:
    def test_loss_and_accuracy_are_means_over_samples_of_all_slots(self):
        """Logits (0, ln 3): p = 1/4, 3/4. Losses ln 4, ln 4/3 twice; two of three are
        right.
        """
        one, other = (classifier(AmpSettings(Precision.FP32)) for _ in range(2))
        logits = torch.tensor([[0.0, math.log(3.0)]])
        returned = one.evaluate_batch((logits.repeat(2, 1), torch.tensor([0, 1])), 0)
        assert returned == {}  # the reducer reports them
        other.evaluate_batch((logits, torch.tensor([1])), 0)
        report = reported(one, other)
        loss = (math.log(4) + 2 * math.log(4 / 3)) / 3
        # float32 logits
        assert report["validation_loss"] == pytest.approx(loss, rel=1e-6)
        assert report["validation_accuracy"] == pytest.approx(2 / 3)

    def test_half_precision_logits_are_summed_in_float32(self):
        """The cross-entropy of 4096 equal float16 rows is not rounded to float16's 3
        digits.
        """
        settings = AmpSettings(Precision.AMP_FP16, eval_precision=EvalPrecision.SAME)
        trial = classifier(settings)
        logits = torch.zeros(4096, 10, dtype=torch.float16)
        trial.evaluate_batch((logits, torch.zeros(4096, dtype=torch.int64)), 0)
        report = reported(trial)
        assert report["validation_loss"] == pytest.approx(math.log(10), rel=1e-6)
