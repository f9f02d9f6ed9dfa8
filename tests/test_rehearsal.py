"""`amp.rehearse`: a batch can be trained any number of times without a step; nothing
moves.
"""

import math
import random
from typing import Any

import determined as det
import numpy as np
import pytest
import torch
from determined import pytorch
from torch import nn

from benchmarks.small_trials import (
    BatchNormCNN,
    PreNormTransformer,
    SmallTrial,
    SummedLoss,
)
from determined_amp import AmpSettings, MixedPrecision, Precision
from determined_amp.amp.rehearse.regions import float16_as
from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.rehearse.searching import largest_working
from determined_amp.experiment.experiment import experiment_in, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.prediction import LossScaleError
from determined_amp.finder.scale_finding import find_range
from determined_amp.finder.scoring import score_batches
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.loss_scale import in_training, wrapped_scaler
from tests import harness
from tests.loss_scale import config, looked_at, train
from tests.run_here import ROOT, SMALL, digest


def state(trial):
    """Everything that a step, a forward or a backward can move."""
    gradients = [parameter.grad for parameter in trial.model.parameters()]
    numpys = np.random.get_state(legacy=False)
    return digest(
        [
            trial.model.state_dict(),
            trial.optimizer.state_dict(),
            trial.scaler.state_dict(),
            gradients,
            torch.random.get_rng_state(),
            [random.getstate(), str(numpys["state"])],
        ]
    )


class TestNothingMoves:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
    @pytest.mark.parametrize("trial", [BatchNormCNN, PreNormTransformer])
    def test_rehearsal_moves_nothing_in_a_trial(self, trial, dtype):
        def work(small, context, batches):
            before = state(small)
            batches[0].run(2.0**10, dtype)
            assert state(small) == before
            # the control: a step does move it
            trial.train_batch(small, batches[0].batch, 0, 0)
            assert state(small) != before

        looked_at(trial, work, steps=1)  # so that there are gradients to keep

    def test_rate_that_a_training_sets_itself_is_put_back(self):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def train(scale):
            optimizer.param_groups[0]["lr"] = 0.1
            torch.autograd.backward(weight * 2.0)

        Rehearsal(train, [], [optimizer]).run()
        assert optimizer.param_groups[0]["lr"] == 0.5

    def test_backward_hook_that_a_training_registers_stays_a_full_one(self):
        model, seen = nn.Linear(1, 1), []

        def train(scale):
            if not model._backward_hooks:
                model.register_full_backward_hook(lambda *given: seen.append(given[2]))
            torch.autograd.backward(model(torch.ones(1, 1, requires_grad=True)))

        Rehearsal(train, [model], []).run()
        train(None)
        assert [gradient.tolist() for (gradient,) in seen] == [[[1.0]]] * 2

    def test_attributes_that_a_module_sets_in_its_forward_are_put_back(self):
        class Keeps(nn.Linear):
            forwards = 0

            def forward(self, x):
                self.forwards, self.seen = self.forwards + 1, x
                return super().forward(x)

        model = Keeps(1, 1)
        model.forwards = 5
        before = dict(vars(model))

        def train(scale):
            torch.autograd.backward(model(torch.ones(1, 1)))
            assert model.forwards == 6

        Rehearsal(train, [model], []).run()
        assert vars(model) == before


def weight_and_rehearsal(train):
    """A weight of 1 in no model, and a batch that trains it at a scale."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def train_at(scale):
        assert scale is not None
        train(weight, scale)

    return weight, Rehearsal(train_at, [], [optimizer])


class TestOutcome:
    def test_outcome_is_that_of_the_backward_whatever_the_trial_does_after_it(self):
        def train(weight, scale):
            (weight * scale).backward()
            assert weight.grad is not None
            weight.grad.zero_()

        weight, batch = weight_and_rehearsal(train)
        assert [batch.run(scale).is_sound for scale in (1.0, math.inf)] == [True, False]
        outcome = batch.run(math.inf)
        assert outcome.lost == ("(parameter 0 of no model)",)
        assert (outcome.largest_loss, outcome.has_gradients) == (math.inf, True)
        assert weight.grad is None

    def test_outcome_knows_a_loss_that_is_nan_and_a_backward_without_gradients(self):
        def train(weight, scale):
            torch.autograd.backward(torch.tensor(math.nan, requires_grad=True) * 1.0)

        _, batch = weight_and_rehearsal(train)
        outcome = batch.run(1.0)
        assert (outcome.loss_is_finite, outcome.lost, outcome.has_gradients) == (
            False,
            (),
            False,
        )


@pytest.mark.parametrize("guess", [-40, -3, 0, 5, 40])
@pytest.mark.parametrize("answer", [-31, -30, -7, 0, 1, 29, 30])
def test_largest_working_number_is_found_from_any_guess(guess, answer):
    tried = []

    def fails(number):
        tried.append(number)
        return number > answer

    assert largest_working(fails, guess, -30, 30) == answer
    assert len(tried) == len({*tried}) <= 12
    assert -30 <= min(tried) <= max(tried) <= 30


def prepares(monkeypatch, prepare):
    """A small trial trains what this makes of its batches."""
    plain = SmallTrial.train_batch

    def train_batch(trial, batch, epoch_idx, batch_idx):
        return plain(trial, prepare(batch), epoch_idx, batch_idx)

    monkeypatch.setattr(SummedLoss, "train_batch", train_batch)


def test_batches_are_those_of_the_training_in_order(monkeypatch):
    seen = []

    def see(batch):
        seen.append(batch[1])
        return batch

    prepares(monkeypatch, see)
    with open_trial(experiment_in(config(SummedLoss), "test")) as found:
        train(found.trial, 3)

    def labels(small, context, batches):
        return [rehearsal.batch[1] for rehearsal in batches]

    taken = looked_at(SummedLoss, labels, batches=3)
    assert harness.same_bits(seen, taken)


class TestInTraining:
    def test_batch_is_passed_as_the_loop_gave_it_with_all_its_backwards(
        self, monkeypatch
    ):
        seen = []

        def loss_of(small, batch):
            with torch.autocast("cpu", dtype=torch.float16):
                return small.loss(*batch)

        def train_batch(small, batch, epoch_idx, batch_idx):
            seen.append((epoch_idx, batch_idx))
            loss = small.scaler.scale(loss_of(small, batch))
            small.context.backward(loss, retain_graph=True)
            small.context.backward(loss, None, True)  # gradient, retain_graph
            small.context.backward(loss)

        def work(small, context, batches):
            outcome = batches[1].run(2.0)
            assert seen == [(0, 1)]
            loss = loss_of(small, batches[1].batch)
            assert outcome.largest_loss == pytest.approx(2.0 * loss.item())
            assert outcome.is_sound

        monkeypatch.setattr(SummedLoss, "train_batch", train_batch)
        looked_at(SummedLoss, work)

    def test_in_training_returns_or_raises_what_its_work_does(self):
        assert looked_at(SummedLoss, lambda *given: len(given[2])) == 2
        error = det.InvalidHP("no scale")

        def work(batches):
            raise error

        with (
            open_trial(experiment_in(config(SummedLoss), "test")) as found,
            # Determined's context would end the process on it
            pytest.raises(det.InvalidHP) as raised,
        ):
            in_training(found.trial, found.context, 2, work)
        assert raised.value is error

    def test_loop_saves_and_reports_nothing_and_starts_where_it_is_told(
        self, monkeypatch
    ):
        given = {}
        monkeypatch.setattr(
            pytorch.Trainer, "fit", lambda trainer, **named: given.update(named)
        )
        with (
            open_trial(experiment_in(config(SummedLoss), "test")) as found,
            pytest.raises(SystemExit) as stopped,  # as where the platform asks for it
        ):
            in_training(found.trial, found.context, 1, len, "batch-4")
        assert stopped.value.code == 0
        assert given["checkpoint_policy"] == "none"
        assert given["latest_checkpoint"] == "batch-4"
        assert given["reporting_period"].value == given["max_length"].value > 10**12


def test_regions_of_float16_compute_in_the_other_dtype_and_only_meanwhile():
    layer, inputs = nn.Linear(2, 2), torch.ones(1, 2)
    region = torch.autocast("cpu", torch.float16)  # made before, used again after
    other = torch.autocast("cpu", torch.bfloat16)
    off = torch.autocast("cpu", torch.float16, enabled=False)

    def computed(region):
        with region:
            return layer(inputs).dtype

    for dtype, brain in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        with float16_as(dtype) as entered:
            assert computed(region) == dtype
            assert (computed(other), computed(off)) == (brain, torch.float32)
        assert entered == {torch.float16, torch.bfloat16}
    assert computed(region) == torch.float16


@pytest.mark.parametrize("keeps_casts", [True, False])
def test_region_of_another_dtype_keeps_casts_only_if_its_own_does(keeps_casts):
    region = torch.autocast("cpu", torch.float16, cache_enabled=keeps_casts)
    with float16_as(torch.bfloat16), region:
        assert torch.is_autocast_cache_enabled() is keeps_casts
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_BF16])
def test_trial_without_an_enabled_scaler_is_refused(precision):
    context: Any = harness.Context()
    with pytest.raises(LossScaleError, match="it has no enabled GradScaler"):
        wrapped_scaler(context)
    MixedPrecision(context, AmpSettings(precision))
    words = "for float16, set hyperparameters.amp.precision to amp_fp16"
    with pytest.raises(LossScaleError, match=words):
        wrapped_scaler(context)


def popped(batch):
    labels = batch.pop()
    return batch.pop(), labels


def normalised(batch):
    return batch[0].sub_(0.5).div_(0.25), batch[1]


class TestOwnBatch:
    """A trial may do with its batch what it likes: every pass gets its own."""

    @pytest.mark.parametrize("prepare", [popped, normalised])
    def test_trial_that_changes_its_batch_has_the_same_finding_and_score(
        self, prepare, monkeypatch
    ):
        def work(small, context, batches):
            slots = context.distributed
            return find_range(batches, slots), score_batches(batches, slots, 2)

        prepares(monkeypatch, lambda batch: prepare([part.clone() for part in batch]))
        expected = looked_at(SummedLoss, work)
        prepares(monkeypatch, prepare)
        assert looked_at(SummedLoss, work) == expected


def test_audit_and_guard_are_off_before_the_loop_starts():
    raw = read_yaml(str(ROOT / "experiment_configs/mlp/amp.yaml"))
    with open_trial(experiment_in(with_overrides(raw, SMALL), "test")) as found:
        trial: Any = found.trial
        guard = trial.amp.guard
        assert guard.enabled
        assert not in_training(trial, found.context, 1, lambda batches: guard.enabled)
