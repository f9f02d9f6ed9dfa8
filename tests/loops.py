"""One training, written as a loop and as a trial: what both have in common is a `Case`.

A `OneModel` is for tests of a loop alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from determined import pytorch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from determined_amp import AmpLoop, AmpSettings, MixedPrecision, Precision
from determined_amp.amp.tensors import parameters_of
from tests.harness import fit

# So large that the first steps overflow; and it grows soon enough to overflow again.
FP16 = AmpSettings(
    Precision.AMP_FP16, init_scale=2.0**22, growth_interval=3, audit=False
)
BATCHES, RATE = 24, 0.05


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_batches():
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(4, 6, generator=generator),
            torch.randint(3, (4,), generator=generator),
        )
        for _ in range(BATCHES)
    ]


BATCH = make_batches()[0]


def cross_entropy(amp, models, images, labels):
    with amp.autocast():
        return [functional.cross_entropy(model(images), labels) for model in models]


@dataclass(frozen=True)
class Case:
    """What a training does.

    Args:
        losses: Of its models on images and labels; the first argument has autocast and
            the scaler.
        max_norms: A clip for the optimizer of each model; without one nothing is to be
            unscaled.
        settings: The precision, and all else.
        fused: Whether the optimizers are.
        schedule: Makes a scheduler of an optimizer; None for a constant rate.
    """

    losses: Callable[[Any, list[Any], Any, Any], list[torch.Tensor]] = cross_entropy
    max_norms: tuple[float | None, ...] = (0.1,)
    settings: AmpSettings = FP16
    fused: bool = False
    schedule: Callable[[Any], Any] | None = None

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=RATE, fused=self.fused)


class TorchAmp:
    """What PyTorch's own recipe does, by the names of `AmpLoop`."""

    def __init__(self, settings=FP16, window=1):
        self.batches, self.window = 0, window
        self.dtype = settings.precision.autocast_dtype
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=settings.first_scale,
            growth_interval=settings.growth_interval,
            enabled=settings.scales_the_loss,
        )
        self.loss_scale = self.scaler.get_scale
        self.schedulers = []

    def prepare(self, model):
        return model

    def wrap_optimizer(self, optimizer):
        return optimizer

    def wrap_lr_scheduler(self, scheduler):
        self.schedulers.append(scheduler)

    def autocast(self):
        return torch.autocast("cpu", self.dtype, enabled=self.dtype is not None)

    def clip_gradients(self, optimizer, max_norm):
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters_of(optimizer), max_norm)

    def update(self, loss, samples=None):
        self.batches += 1
        if self.batches % self.window == 0:
            self.scaler.update()
            for scheduler in self.schedulers:
                states = scheduler.optimizer.state.values()
                if any(state["step"] > scheduler.last_epoch for state in states):
                    scheduler.step()  # Adam counts applied steps


class Training:
    """A case in a loop, with the calls of `AmpLoop`, whoever answers them.

    Attributes:
        bits: Weights, rates and loss scale after every window of batches.
    """

    def __init__(self, case, amp, window=1):
        self.case, self.amp, self.window = case, amp, window
        self.models = [amp.prepare(make_model()) for _ in case.max_norms]
        self.optimizers = [
            amp.wrap_optimizer(case.optimizer(model)) for model in self.models
        ]
        if case.schedule is not None:
            for optimizer in self.optimizers:
                amp.wrap_lr_scheduler(case.schedule(optimizer))
        self.bits = []

    def run(self, first=0, last=BATCHES):
        """Train from one batch to another."""
        for number, batch in enumerate(make_batches()[first:last], start=first + 1):
            losses = self.case.losses(self.amp, self.models, *batch)
            for loss in losses:
                scaled = self.amp.scaler.scale(loss)
                scaled.backward(retain_graph=loss is not losses[-1])
            is_end = number % self.window == 0
            if is_end:
                self.step()
            self.amp.update(losses[0], samples=len(batch[1]))
            if is_end:
                self.end_window()

    def step(self):
        for optimizer, max_norm in zip(
            self.optimizers, self.case.max_norms, strict=True
        ):
            if self.window > 1:
                gradients = [
                    p.grad for p in parameters_of(optimizer) if p.grad is not None
                ]
                torch._foreach_div_(gradients, float(self.window))
            if max_norm is not None:
                self.amp.clip_gradients(optimizer, max_norm)
            self.amp.scaler.step(optimizer)
            optimizer.zero_grad()

    def end_window(self):
        self.bits.append(bits_of(self))


def bits_of(made):
    """The weights, the rates and the loss scale of a loop or a trial."""
    weights = [p.detach().clone() for model in made.models for p in model.parameters()]
    rates = [
        torch.as_tensor(o.param_groups[0]["lr"]).double().clone()
        for o in made.optimizers
    ]
    return [*weights, *rates, torch.as_tensor(made.amp.loss_scale()).clone()]


def by_hand(case, window=1):
    """The bits of PyTorch's own loop."""
    made = Training(case, TorchAmp(case.settings, window), window)
    made.run()
    return made.bits


class OneModel:
    """One model in a loop, whose weights and scale are noted after every batch."""

    def __init__(self, amp):
        self.amp = amp
        self.model = amp.prepare(make_model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.bits = []

    def loss_fn(self, batch=BATCH):
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    def loss(self, batch=BATCH):
        with self.amp.autocast():
            return self.loss_fn(batch)

    def backward(self, batch=BATCH):
        loss = self.loss(batch)
        self.amp.scaler.scale(loss).backward()
        return loss

    def step(self):
        self.amp.scaler.step(self.optimizer)

    def train(self, batch=BATCH):
        loss = self.backward(batch)
        self.step()
        self.optimizer.zero_grad()
        self.end(loss)
        return loss.item()

    def end(self, loss):
        self.amp.update(loss)
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.bits.append([*weights, torch.tensor(self.amp.scaler.get_scale())])


def one_model(precision="amp_fp16", **settings):
    """In an `AmpLoop`."""
    return OneModel(AmpLoop(AmpSettings(Precision(precision), **settings), "cpu"))


class ReadsFoundInf(torch.optim.SGD):
    """A user's own, which torch's scaler lets skip on the device, as a fused one."""

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                change = weight.grad * group["lr"]
                if self.grad_scale is not None:  # not unscaled yet
                    change /= self.grad_scale
                weight.sub_(torch.where(self.found_inf > 0, 0.0, change))


class Trial(pytorch.PyTorchTrial):
    """A case as a trial; `bits` as of a `Training`."""

    def __init__(self, context, case, window=1):
        self.context, self.case, self.window = context, case, window
        self.amp = MixedPrecision(context, case.settings)
        self.models = [
            context.wrap_model(self.amp.prepare(make_model())) for _ in case.max_norms
        ]
        self.optimizers = [
            context.wrap_optimizer(case.optimizer(model)) for model in self.models
        ]
        if case.schedule is not None:
            for optimizer in self.optimizers:
                self.amp.wrap_lr_scheduler(case.schedule(optimizer))
        self.bits = []

    def train_batch(self, batch, epoch_idx, batch_idx):
        losses = self.case.losses(self.amp, self.models, *batch)
        for loss in losses:
            scaled = self.amp.scaler.scale(loss)
            self.context.backward(scaled, retain_graph=loss is not losses[-1])
        for optimizer, max_norm in zip(
            self.optimizers, self.case.max_norms, strict=True
        ):
            clip = None if max_norm is None else self.amp.clip(optimizer, max_norm)
            self.context.step_optimizer(
                optimizer, clip_grads=clip, scaler=self.amp.scaler
            )
        reported = self.amp.update(losses[0], samples=len(batch[1]))
        if (batch_idx + 1) % self.window == 0:
            self.bits.append(bits_of(self))
        return reported

    def evaluate_batch(self, batch, batch_idx):
        return {"validation_loss": 0.0}

    def build_training_data_loader(self):
        columns = (torch.cat(column) for column in zip(*make_batches(), strict=True))
        return pytorch.DataLoader(TensorDataset(*columns), batch_size=4)

    build_validation_data_loader = build_training_data_loader

    def build_callbacks(self):
        return self.amp.callbacks(self)


def fitted(case, window=1, **options):
    """Train a case as a trial."""
    make = partial(Trial, case=case, window=window)
    return fit(make, batches=BATCHES, aggregation_frequency=window, **options)
