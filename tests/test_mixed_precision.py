"""`MixedPrecision` in trials of a stranger's shape: what it reports, and what it leaves
alone.
"""

import math
import sys
from typing import Any

import pytest
import torch

from determined_amp import AmpSettings, ConfigError, MixedPrecision, Precision
from determined_amp.amp.patched import patched
from determined_amp.experiment.failures import ending_the_program
from tests.harness import Context, batches_of, fit
from tests.trials import FP16_SECTION as FP16
from tests.trials import Weights


def report_of(trial, amp=FP16):
    """The one report of a run over all rows."""
    batches = len(trial.rows)
    return fit(trial, amp, batches=batches, reporting_period=batches).report


@pytest.mark.usefixtures("_switches_restored")
@pytest.mark.parametrize(
    "set_backends", [False, True], ids=["not asked for", "asked for"]
)
def test_torchs_switches_are_set_only_if_that_is_asked_for(set_backends):
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    context: Any = Context()
    MixedPrecision(context, AmpSettings(Precision.FP32, set_backends=set_backends))
    assert torch.get_float32_matmul_precision() == (
        "highest" if set_backends else "high"
    )
    assert torch.backends.cudnn.allow_tf32 is not set_backends


def test_settings_of_a_scale_that_a_precision_has_not_are_named_in_the_log(caplog):
    caplog.set_level("INFO")
    fit(Weights, {"precision": "fp32", "init_scale": 8.0}, batches=1)
    assert "fp32 has no loss scale: ignoring init_scale" in caplog.text


class ReportsItsOwnLoss(Weights):
    def train_batch(self, batch, epoch_idx, batch_idx):
        return {**super().train_batch(batch, epoch_idx, batch_idx), "loss": 7.0}


class ReturnsTheLoss(Weights):
    """A tensor: Determined reports it as `loss`, the mean over batches."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        super().train_batch(batch, epoch_idx, batch_idx)
        return torch.tensor(7.0)


class UpdatesWithoutALoss(Weights):
    def train_batch(self, batch, epoch_idx, batch_idx):
        self.backward(batch)
        self.step()
        return self.amp.update()


class CountsItsOwnSamples(Weights):
    """A batch of x counts x samples."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.backward(batch)
        return self.amp.update(batch[0].mean())

    def get_batch_length(self, batch):
        return int(batch[0][0])


@pytest.mark.parametrize(
    ("trial", "loss"),
    [
        (Weights, (1 + 2.25) / 2),  # the mean of w x over samples: 1 * 1 and 3/4 * 3
        (ReportsItsOwnLoss, 7),
        (ReturnsTheLoss, 7),
        (UpdatesWithoutALoss, None),
        (CountsItsOwnSamples, 2.5),  # (1 * 1 + 3 * 3) / (1 + 3)
    ],
)
def test_reported_loss_is_the_trials_or_a_mean_over_samples(trial, loss):
    report = report_of(trial)
    assert report.get("loss") == loss
    assert report["watch_applied_steps"] == (0 if trial is CountsItsOwnSamples else 2)


class UpdatesOnceMore(Weights):
    rows = ((1.0, 1.0),) * 10

    def train_batch(self, batch, epoch_idx, batch_idx):
        super().train_batch(batch, epoch_idx, batch_idx)
        return self.amp.update(math.nan)


def test_guard_counts_no_batch_with_a_step_as_left_out_for_its_second_update():
    assert report_of(UpdatesOnceMore)["watch_applied_steps"] == 10


def test_patched_class_attribute_comes_back_as_it_was():
    class Owner:
        @staticmethod
        def own():
            return "own"

    class Heir(Owner):
        pass

    for owner in (Owner, Heir):
        had = dict(vars(owner))
        with patched(owner, "own", lambda: "replaced"):
            assert owner.own() == "replaced"
        assert (owner.own(), owner().own()) == ("own", "own")
        assert dict(vars(owner)) == had


def test_newest_batch_is_copied_once_a_training_has_changed_one():
    """The first one always is; a copy has tensors and containers of its own."""
    changes = iter([False, False, True, False, False, True])
    trained = []

    def train_batch(batch):
        (rows,) = batch.pop("inputs")
        trained.append(rows.tolist())
        if next(changes):
            rows.zero_()
        return {}

    settings = AmpSettings(Precision.FP32, audit=False)
    trial, amp = batches_of(train_batch, settings)
    batches = trial.train_batch
    assert batches.rehearsal() is None  # before the first
    shared = []
    for index in range(5):
        rows = torch.ones(3)
        assert trial.train_batch({"inputs": [rows]}, 7, index) == {}
        newest = batches.kept.batch  # None if it shares what is changed
        shared.append(newest and newest["inputs"][0] is rows)
    rehearsal = batches.rehearsal()
    assert rehearsal is not None
    rehearsal.run()
    assert trained[-1] == trained[-2] == [1.0, 1.0, 1.0]
    assert batches.kept.batch["inputs"][0].tolist() == [1.0, 1.0, 1.0]
    assert shared == [False, True, None, False, False]
    amp.on_trial_shutdown()
    assert trial.train_batch is not batches
    assert batches.rehearsal() is None


def test_only_errors_of_the_user_are_printed_in_place_of_a_traceback(
    monkeypatch, capfd
):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *caught: seen.append(caught))
    context: Any = Context()
    with pytest.raises(ValueError, match="of torch"), ending_the_program():
        raise ValueError("of torch")
    MixedPrecision(context, AmpSettings(Precision.FP32))
    assert not sys.excepthook.__module__.startswith("determined_amp")
    with pytest.raises(ConfigError, match="has one already"):
        MixedPrecision(context, AmpSettings(Precision.FP32))
    assert sys.excepthook.__module__.startswith("determined_amp")
    error = ValueError("of torch")
    sys.excepthook(ValueError, error, None)
    assert seen == [(ValueError, error, None)]
    assert capfd.readouterr().err == ""
    with pytest.raises(SystemExit, match="2"):
        sys.excepthook(ConfigError, ConfigError("the trial", ["a mistake"]), None)
    assert capfd.readouterr().err == "error: the trial: a mistake\n"
