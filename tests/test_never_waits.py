"""No training step makes the host wait for the device, and a report waits once.

The MLP runs in Determined's own loop, loader and validation included, on the fake CUDA
device of `fake_cuda`. `test_contract.py` asks this of every trial, `test_gpu.py` on a
real device.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from determined_amp.amp import schedules
from determined_amp.amp.loop import AmpLoop
from determined_amp.amp.metrics import TrainingMetrics
from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.experiment.experiment import parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.trial.controller import SafeController
from determined_amp.trial.make import trial_of
from tests import habits
from tests.fake_cuda import fake_cuda, needs_fake_cuda
from tests.harness import fit
from tests.loops import ReadsFoundInf
from tests.run_here import ROOT

CONFIGS = ROOT / "experiment_configs"
BATCHES = 12
REPORTING_PERIOD = 4
OVERRIDES = (
    "data.dataset=synthetic",
    "data.samples=64",
    "data.image_size=8",
    "hyperparameters.global_batch_size=8",
    "hyperparameters.max_grad_norm=1.0",
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=2",
    "hyperparameters.amp.audit=false",  # of the first batches alone; it times kernels
    f"hyperparameters.training.max_length={{batches: {BATCHES}}}",
)


class Loop(SafeController):
    """Determined's loop, which says what it does.

    Fake tensors have no values, so there is nothing to save and nothing for the guard
    to judge.
    """

    def __init__(self, during, **fitted):
        super().__init__(**fitted)
        self._during = during
        self.callbacks.pop("determined_amp.guard", None)

    def _train_with_boundaries(self, *arguments):
        with self._during("batches"):
            return super()._train_with_boundaries(*arguments)

    def _aggregate_training_metrics(self, *arguments):
        with self._during("report"):
            return super()._aggregate_training_metrics(*arguments)

    def _checkpoint(self, already_exiting):
        assert self.state is not None
        self.state.last_ckpt = self.state.batches_trained


def train(during, config, *overrides, gpus=1):
    """Train in Determined's loop; the trial notes in `dtypes` what its model returns in
    training.

    Args:
        during: Entered with the name of each phase, `batches` and `report`.
        config: Path in `experiment_configs`.
        overrides: `key=value`, on top of `OVERRIDES`.
        gpus: 0 trains on the CPU.
    """
    raw = with_overrides(read_yaml(str(CONFIGS / config)), [*OVERRIDES, *overrides])
    experiment = parse(raw, config)
    length = experiment.max_length.batches
    assert length is not None

    def make(context):
        trial: Any = trial_of(experiment, context)
        trial.dtypes = set()

        def note_dtype(model, inputs, outputs):
            if model.training:
                trial.dtypes.add(outputs.dtype)

        trial.model.register_forward_hook(note_dtype)
        return trial

    return fit(
        make,
        batches=length,
        reporting_period=REPORTING_PERIOD,
        hparams=raw["hyperparameters"],
        exp_conf=raw,
        gpus=gpus,
        aggregation_frequency=experiment.aggregation_frequency,
        loop=partial(Loop, during),
    )


@needs_fake_cuda
@pytest.mark.parametrize(
    ("precision", "aggregation_frequency"),
    [*((precision, 1) for precision in Precision), (Precision.AMP_FP16, 2)],
)
def test_batches_never_wait_and_a_report_reads_once(precision, aggregation_frequency):
    with fake_cuda() as syncs:
        run = train(
            syncs.during,
            "mlp/fp32.yaml",
            f"hyperparameters.amp.precision={precision.value}",
            f"hyperparameters.aggregation_frequency={aggregation_frequency}",
        )
    assert syncs.waits["batches"] == {}
    # The stopwatch starts after ten batches; the last of three reports waits for its
    # end.
    assert syncs.waits["report"] == {"read": 3, "wait": 1}
    # And these batches did what they are for: cast, unscale, clip, step, move the
    # schedule.
    assert run.trial.dtypes == {precision.autocast_dtype or torch.float32}
    steps = BATCHES // aggregation_frequency
    scaled = steps if precision is Precision.AMP_FP16 else 0
    calls = syncs.calls["batches"]
    assert calls["_amp_foreach_non_finite_check_and_unscale_"] == scaled
    assert calls["_foreach_mul_"] == steps
    assert calls["_fused_adam_"] == steps
    assert calls["_amp_update_scale_"] == scaled
    # the schedule; on the host where nothing is skipped
    assert calls["index_select"] == scaled
    assert run.trial.optimizer.defaults["fused"] is True


class Unmodified(habits.ClipsOutside):
    """Returns no loss, which Determined would read."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        super().train_batch(batch, epoch_idx, batch_idx)
        return {}


@needs_fake_cuda
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_FP16])
def test_batches_of_an_unmodified_trial_wait_for_their_copy_alone(precision):
    with fake_cuda() as syncs:
        run = train(
            syncs.during,
            "mlp/fp32.yaml",
            f"hyperparameters.trial={__name__}:Unmodified",
            f"hyperparameters.amp.precision={precision.value}",
        )
    # Determined's loop copies inputs and classes to the device, as it does for any
    # trial.
    assert syncs.waits["batches"] == {"copy": 2 * BATCHES}
    calls = syncs.calls["batches"]
    scaled = BATCHES if precision is Precision.AMP_FP16 else 0
    assert calls["_foreach_norm"] >= scaled  # of the unscaled gradients
    # Its clip, the unscaling, and the zeroing after an overflow.
    assert calls["_foreach_mul_"] == BATCHES + 2 * scaled
    assert calls["_fused_sgd_"] == BATCHES
    assert run.trial.dtypes == {torch.float32}  # as handed on


@needs_fake_cuda
@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.Adam, fused=True), partial(ReadsFoundInf, lr=0.1)],
    ids=["fused", "a user's own"],
)
def test_batches_of_a_loop_never_wait_and_a_report_reads_once(make, monkeypatch):
    """As in a GAN: the first optimizer is unscaled when the second loss goes
    backward. The schedulers run ahead again and again.
    """
    monkeypatch.setattr(schedules, "_AHEAD", BATCHES // 3)
    with fake_cuda() as syncs:
        amp = AmpLoop(AmpSettings(Precision.AMP_FP16), "cuda")
        amp.guard.enabled = False  # fake tensors have no values to judge
        models = [amp.prepare(nn.Linear(6, 3).to("cuda")) for _ in range(2)]
        optimizers = [make(model.parameters()) for model in models]
        for optimizer in optimizers:
            amp.wrap_lr_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        x = torch.ones(4, 6, device="cuda")
        with syncs.during("batches"):
            for _ in range(BATCHES):
                for model, optimizer in zip(models, optimizers, strict=True):
                    with amp.autocast():
                        loss = model(x).float().mean()
                    amp.scaler.scale(loss).backward()
                    amp.clip_gradients(optimizer, 0.1)
                for optimizer in optimizers:
                    amp.scaler.step(optimizer)
                amp.update(loss, samples=len(x))
        with syncs.during("report"):
            amp.report()
    assert syncs.waits["batches"] == {}
    assert syncs.waits["report"]["read"] == 1
    calls = syncs.calls["batches"]
    assert calls["index_select"] > 2 * BATCHES
    assert calls["cat"] == 2 * 4


class ReadsTheLoss(TrainingMetrics):
    """Planted: `loss.item()`."""

    def add(self, loss, samples, **named):
        loss.item()
        return super().add(loss, samples, **named)


class UnfusedAdam(torch.optim.Adam):
    """Planted: the host looks at `found_inf` to decide whether to step."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **{**settings, "fused": False})


def copy_from_pageable(batch, device):
    """Planted: `non_blocking` alone is not enough."""
    images, labels = (tensor.clone() for tensor in batch)
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


METRICS = "determined_amp.amp.core.TrainingMetrics"

# Where it is planted, what is, and what each batch then costs.
PLANTED = {
    "loss.item()": (METRICS, ReadsTheLoss, Counter(read=1)),
    "fused=False": ("torch.optim.Adam", UnfusedAdam, Counter(read=1)),
    "pin_memory=False": (
        "trials.data.loading.to_device",
        copy_from_pageable,
        Counter(copy=2),
    ),
}


@needs_fake_cuda
@pytest.mark.parametrize("name", PLANTED)
def test_planted_wait_is_counted_in_each_batch(name, monkeypatch):
    """With a constant rate: the schedule of an optimizer that is not fused reads
    too.
    """
    place, planted, per_batch = PLANTED[name]
    monkeypatch.setattr(place, planted)
    constant = (
        "hyperparameters.lr_schedule=constant",
        "hyperparameters.warmup_steps=0",
    )
    length = "hyperparameters.training.max_length={batches: 4}"
    with fake_cuda() as syncs:
        train(syncs.during, "mlp/amp.yaml", *constant, length)
    assert syncs.waits["batches"] == {
        kind: 4 * count for kind, count in per_batch.items()
    }


WAITING = {
    "bool": ("read", lambda tensor: bool(tensor.isfinite().all())),
    "cpu": ("read", lambda tensor: tensor.to("cpu", non_blocking=True)),
    "mask": ("read", lambda tensor: tensor[tensor > 0]),
    "copy of a list": ("copy", lambda tensor: torch.tensor([1.0], device="cuda")),
    "copy": ("copy", lambda tensor: tensor.copy_(torch.ones(3).pin_memory())),
    "synchronize": ("wait", lambda tensor: torch.cuda.synchronize()),
}


@needs_fake_cuda
@pytest.mark.parametrize("name", WAITING)
def test_call_that_waits_for_the_device_is_counted_once(name):
    kind, call = WAITING[name]
    with fake_cuda() as syncs:
        tensor = torch.ones(3, device="cuda")
        # Some go on to need the values, and fail.
        with syncs.during("call"), contextlib.suppress(RuntimeError):
            call(tensor)
    assert syncs.waits["call"] == {kind: 1}
