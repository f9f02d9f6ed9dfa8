"""Trials whose every number can be written down: y = w x from w = 1, the loss is
mean(y), SGD.

The gradient dL/dw is mean(x) whatever w is, and a step moves w by -rate * mean(x).
Powers of two are exact in float16, so in every precision the weights are exact too. A
batch with x = inf makes the gradient non-finite at every loss scale: exactly those
steps are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.utils.data import TensorDataset

from determined_amp import AmpSettings, MixedPrecision, Precision
from tests import habits
from tests.harness import fit, loader

Rows = Sequence[Sequence[float]]

ONE = [1.0, 1.0]
INF = [math.inf, 1.0]
AMP = AmpSettings(Precision.AMP_FP16, init_scale=4.0, growth_interval=2)
FP32, BF16 = AmpSettings(Precision.FP32), AmpSettings(Precision.AMP_BF16)
# The same as a section of hyperparameters.
FP16_SECTION = {"precision": "amp_fp16", "init_scale": 4.0}
FP32_SECTION = {"precision": "fp32"}


class Weights(pytorch.PyTorchTrial):
    """In the fewest lines, with a method for whatever a subclass does otherwise.

    Attributes:
        rows: The batches; each holds the x of its samples.
        count: How many models, each with an optimizer; all get the same x.
    """

    rows: Rows = ((1.0, 1.0), (3.0, 3.0))
    count = 1

    def __init__(self, context, settings=None):
        self.context = context
        self.amp = MixedPrecision(context, settings)
        self.models, self.optimizers = [], []
        for _ in range(self.count):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            self.models.append(context.wrap_model(self.amp.prepare(model)))
            optimizer = self.optimizer_of(self.models[-1].parameters())
            self.optimizers.append(self.wrapped(optimizer))
        self.model, self.optimizer = self.models[0], self.optimizers[0]

    def optimizer_of(self, parameters):
        return torch.optim.SGD(parameters, lr=0.25, momentum=0.5)

    def wrapped(self, optimizer):
        return self.context.wrap_optimizer(optimizer)

    def x_of(self, batch, which):
        return batch[0]

    def backward(self, batch, which=0):
        with self.amp.autocast():
            loss = self.models[which](self.x_of(batch, which)).float().mean()
        self.context.backward(self.amp.scaler.scale(loss))
        return loss

    def step(self, which=0):
        clip = self.amp.clip(self.optimizers[which], math.inf)
        self.context.step_optimizer(
            self.optimizers[which], clip_grads=clip, scaler=self.amp.scaler
        )

    def train_batch(self, batch, epoch_idx, batch_idx):
        for which in range(self.count):
            loss = self.backward(batch, which)
            self.step(which)
        return self.amp.update(loss, samples=len(batch[0]))

    def weights(self):
        return [float(next(model.parameters()).detach()) for model in self.models]

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": 0.0}

    def build_training_data_loader(self):
        return loader(self.rows)

    def build_validation_data_loader(self):
        return loader([[0.0]] * self.context.distributed.size)

    def build_callbacks(self):
        return self.amp.callbacks(self)


class LeavesAutocast(Weights):
    """Computes in float32, whatever its precision is."""

    def __init__(self, context, settings=None):
        super().__init__(context, settings)
        self.amp.autocast = nullcontext  # type: ignore[method-assign]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


Modes = pytorch.LRScheduler.StepMode


class Scheduled(Weights):
    """Notes what every batch steps with. Its second batch overflows in float16.

    Args:
        context: The trial's context.
        make_scheduler: Of its optimizer; None leaves the rate alone.
        mode: Of `context.wrap_lr_scheduler`; None has the library wrap it.
        make_optimizer: Of its parameters.
    """

    rows = ((1.0,), (math.inf,), *((1.0,),) * 10)

    def __init__(
        self,
        context,
        make_scheduler,
        mode,
        make_optimizer,
    ):
        self.optimizer_of = make_optimizer  # type: ignore[method-assign]
        self.mode = mode
        super().__init__(context)
        self.seen = []
        if make_scheduler is None:
            return
        self.scheduler = make_scheduler(self.optimizer)
        if mode is None:
            self.amp.wrap_lr_scheduler(self.scheduler)
        else:
            context.wrap_lr_scheduler(self.scheduler, mode)

    def train_batch(self, batch, epoch_idx, batch_idx):
        (group,) = self.optimizer.param_groups
        others = (group.get(key) for key in ("momentum", "betas"))
        self.seen.append((float(group["lr"]), *others))
        reported = super().train_batch(batch, epoch_idx, batch_idx)
        if self.mode is Modes.MANUAL_STEP:
            self.scheduler.step()
        return reported

    def build_training_data_loader(self):
        # Some schedules are by epochs: three of four batches, the second of each
        # overflows.
        return loader(
            self.rows[:4] if self.mode is Modes.STEP_EVERY_EPOCH else self.rows
        )


def run_of(
    make_scheduler,
    mode=None,
    make_optimizer=sgd,
    **options,
):
    """Trains a `Scheduled` on so many batches, from a run on if one is given."""

    def run(batches, resume=None):
        def make(context):
            return Scheduled(context, make_scheduler, mode, make_optimizer)

        amp = {"precision": "amp_fp16", "init_scale": 64.0}
        one = {"batch_size": 1, **options}
        return fit(make, amp, batches=batches, resume=resume, **one)

    return run


class OneWeight(Weights):
    """Notes its weight and its scale; SGD with rate 0.5.

    Attributes:
        scales: Loss scale after every batch.
        trace: w after every batch.
    """

    def __init__(self, context, rows, amp):
        self.rows = rows
        super().__init__(context, amp)
        self.scales = []
        self.trace = []

    def optimizer_of(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    def train_batch(self, batch, epoch_idx, batch_idx):
        reported = super().train_batch(batch, epoch_idx, batch_idx)
        self.scales.append(float(self.amp.loss_scale()))
        self.trace += self.weights()
        return reported


def weigh(rows, amp=AMP, trial=OneWeight, *, processes=None, **options):
    """Train the one weight on these rows, of which ranks take turns, with one report at
    the end.
    """
    batches = len(rows) // (processes.size if processes else 1)
    options = {"batches": batches, "reporting_period": batches, **options}
    return fit(
        lambda context: trial(context, rows, amp),
        batch_size=len(rows[0]),
        processes=processes,
        **options,
    )


class TwoWeights(Weights):
    """A discriminator y = w_d x_d and a generator y = w_g x_g, both from w = 1, SGD
    with rate 0.5.

    A row is a batch of one sample, (x_d, x_g).

    Attributes:
        fused: Whether the optimizers are.
        diagnosed: How often the guard trained a batch again.
    """

    count = 2
    fused = False

    def __init__(self, context, rows):
        self.rows = rows
        super().__init__(context)
        self.diagnosed = 0

    def optimizer_of(self, parameters):
        return torch.optim.SGD(parameters, lr=0.5, fused=self.fused)

    def x_of(self, batch, which):
        return batch[which]

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.diagnosed += self.amp.is_rehearsing
        losses = []
        for which in range(2):
            losses.append(self.backward(batch, which))
            if which == 0 or self.steps_generator(batch_idx):
                self.step(which)
        return self.amp.update(losses[0])

    def steps_generator(self, batch_idx):
        return True

    def build_training_data_loader(self):
        columns = torch.tensor(self.rows).T.reshape(2, -1, 1)
        return pytorch.DataLoader(TensorDataset(*columns), batch_size=1)

    def build_validation_data_loader(self):
        zeros = torch.zeros(self.context.distributed.size, 1)
        return pytorch.DataLoader(TensorDataset(zeros, zeros), batch_size=1)


def weigh_two(rows, amp, trial=TwoWeights, **options):
    """Train the pair on these rows."""
    options = {"batches": len(rows), **options}
    return fit(lambda context: trial(context, rows), amp, batch_size=1, **options)


class Plain(habits.Habit):
    """A classifier in float32 with what people use: norm, dropout, clip, a moving
    rate.
    """

    def __init__(self, context):
        super().__init__(context)
        halving: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        context.wrap_lr_scheduler(halving, Modes.STEP_EVERY_OPTIMIZER_STEP)

    def net(self):
        return nn.Sequential(
            nn.Linear(habits.FEATURES, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.25),
            nn.Linear(16, habits.CLASSES),
        )

    def optimizer_of(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01)

    def step(self):
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)

    def clip(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 0.5)


class Converted(Plain):
    """The same by docs/your_trial.md."""

    def __init__(self, context):
        self.amp = MixedPrecision(context)
        super().__init__(context)

    def net(self):
        return self.amp.prepare(super().net())

    def train_batch(self, batch, epoch_idx, batch_idx):
        with self.amp.autocast():
            loss = self.loss(*batch)
        self.context.backward(self.amp.scaler.scale(loss))
        clip = self.amp.clip(self.optimizer, 0.5)
        self.context.step_optimizer(
            self.optimizer, clip_grads=clip, scaler=self.amp.scaler
        )
        return {"loss": loss, **self.amp.update(loss)}

    def build_callbacks(self):
        return self.amp.callbacks(self)
