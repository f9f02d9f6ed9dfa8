"""The loops that `benchmarks.peers` compares, with one model and the same batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from determined import core, pytorch
from torch import nn
from torch.nn import functional

from benchmarks.measured import DEVICE, ROOT
from benchmarks.turns import BATCHES_PER_ROUND, Turns
from determined_amp.amp.loop import AmpLoop
from determined_amp.experiment.experiment import Experiment, parse, read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.local.open_trial import core_context_of, trial_context
from determined_amp.trial.determined_private import amp_of
from determined_amp.trial.fitting import fit
from determined_amp.trial.make import trial_of
from trials.data import images as data
from trials.data import loading
from trials.mlp import MLPTrial
from trials.schedule import LRSchedule

BASE = str(ROOT / "experiment_configs/mlp/fp32.yaml")


class Case:
    """The training that all loops repeat: a 64-64-10 MLP, in batches of 8.

    Args:
        precision: `amp.precision`.
        schedule: `lr_schedule`.
        batches: Length of the run, in batches.
    """

    def __init__(self, precision: str, schedule: str, batches: int) -> None:
        overrides = (
            f"hyperparameters.amp.precision={precision}",
            f"hyperparameters.lr_schedule={schedule}",
            *(
                f"hyperparameters.training.{name}.batches={batches}"
                for name in ("max_length", "validation_period", "checkpoint_period")
            ),
            "data.image_size=8",
            "hyperparameters.hidden_features=64",
            "hyperparameters.global_batch_size=8",
        )
        self.experiment = parse(with_overrides(read_yaml(BASE), overrides), BASE)
        self.hparams = self.experiment.hparams
        assert self.hparams.max_grad_norm is not None
        self.max_grad_norm: float = self.hparams.max_grad_norm
        self.autocast_dtype = self.hparams.amp.precision.autocast_dtype
        self.device = DEVICE

    def loader(self) -> pytorch.DataLoader:
        seed, settings = self.experiment.seed, self.experiment.data
        images, _ = data.load(settings, seed)
        return loading.training_loader(
            images, self.hparams.global_batch_size, seed, settings.workers
        )

    def model(self) -> nn.Module:
        width, settings = self.hparams.hidden_features, self.experiment.data
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(settings.channels * settings.image_size**2, width),
            nn.ReLU(),
            nn.Linear(width, settings.classes),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of `MLPTrial`."""
        fused = self.device.type == "cuda"
        return torch.optim.Adam(
            model.parameters(), lr=self.hparams.learning_rate, fused=fused
        )

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """PyTorch's scheduler, or None for a constant rate."""
        if self.hparams.lr_schedule is LRSchedule.CONSTANT:
            return None
        batches = self.experiment.max_length.batches
        assert batches is not None
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches)

    def autocast(self) -> torch.autocast:
        dtype = self.autocast_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def scaler(self) -> torch.amp.GradScaler:
        enabled = self.autocast_dtype is torch.float16
        return torch.amp.GradScaler(self.device.type, enabled=enabled)


class NoReports(core.DummyTrainContext):
    """Drops reports; Determined's own class formats every metric of every batch."""

    def _report_trial_metrics(self, *arguments: Any, **named: Any) -> None:
        return


@contextmanager
def context_of(experiment: Experiment) -> Iterator[pytorch.PyTorchTrialContext]:
    """A Determined context, with seeds set, that drops reports and leaves no files."""
    with (
        TemporaryDirectory() as folder,
        core_context_of(NoReports(Path(folder)), Path(folder)) as core_context,
    ):
        yield trial_context(core_context, experiment)


def batches_of(case: Case, turns: Turns) -> Iterator[loading.Batch]:
    """Yield the batches of a case, on the device, until the turns are over."""
    for batch in case.loader().get_data_loader(repeat=True):
        turns.batch_begins()
        if turns.over:
            return
        yield loading.to_device(batch, case.device)


def bare(case: Case, turns: Turns) -> nn.Module:
    """PyTorch's recipe: https://docs.pytorch.org/docs/stable/notes/amp_examples.html."""
    torch.manual_seed(case.experiment.seed)
    model = case.model().to(case.device)
    optimizer, scaler = case.optimizer(model), case.scaler()
    scheduler, parameters = case.scheduler(optimizer), list(model.parameters())
    for images, labels in batches_of(case, turns):
        with case.autocast():
            loss = functional.cross_entropy(model(images), labels)
        torch.autograd.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, case.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    return model


def amp_loop(case: Case, turns: Turns) -> nn.Module:
    """`AmpLoop`, with a report every 100 batches."""
    torch.manual_seed(case.experiment.seed)
    amp = AmpLoop(case.hparams.amp, case.device)
    model = amp.prepare(case.model()).to(case.device)
    optimizer = case.optimizer(model)
    scheduler = case.scheduler(optimizer)
    if scheduler:
        amp.wrap_lr_scheduler(scheduler)
    for step, (images, labels) in enumerate(batches_of(case, turns), start=1):
        with amp.autocast():
            loss = functional.cross_entropy(model(images), labels)
        torch.autograd.backward(amp.scaler.scale(loss))
        amp.clip_gradients(optimizer, max_norm=case.max_grad_norm)
        amp.scaler.step(optimizer)
        optimizer.zero_grad()
        amp.update(loss, samples=len(labels))
        if step % BATCHES_PER_ROUND == 0:
            amp.report()
    return model


class StockTrial(pytorch.PyTorchTrial):
    """AMP as in Determined's own examples, which report the loss of every batch."""

    def __init__(self, context: pytorch.PyTorchTrialContext, case: Case) -> None:
        self.context = context
        self.case = case
        self.scaler = case.scaler()
        if self.scaler.is_enabled():
            self.scaler = context.wrap_scaler(self.scaler)
        self.model = context.wrap_model(case.model())
        self.optimizer = context.wrap_optimizer(case.optimizer(self.model))
        scheduler = case.scheduler(self.optimizer)
        if scheduler:
            every_step = pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP
            context.wrap_lr_scheduler(scheduler, every_step)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        # The batch is on the device already; this only converts its pixels.
        images, labels = loading.to_device(batch, self.case.device)
        with self.case.autocast():
            loss = functional.cross_entropy(self.model(images), labels)
        self.context.backward(self.scaler.scale(loss))
        self.context.step_optimizer(
            self.optimizer, clip_grads=self.clip_gradients, scaler=self.scaler
        )
        self.scaler.update()
        return {"loss": loss}

    def clip_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(parameters, self.case.max_grad_norm)

    def evaluate_batch(
        self, batch: pytorch.TorchData, batch_idx: int
    ) -> dict[str, float]:
        return {}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self.case.loader()

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self.case.loader()


class SilentTrial(StockTrial):
    """`StockTrial` without metrics, to measure Determined's loop alone."""

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, torch.Tensor]:
        super().train_batch(batch, epoch_idx, batch_idx)
        return {}


def stock(case: Case, turns: Turns) -> nn.Module:
    """`StockTrial` in Determined's loop."""
    return _train_stock(StockTrial, case, turns)


def silent(case: Case, turns: Turns) -> nn.Module:
    """`SilentTrial` in Determined's loop."""
    return _train_stock(SilentTrial, case, turns)


def _train_stock(trial_class: type[StockTrial], case: Case, turns: Turns) -> nn.Module:
    training = case.hparams.training
    with context_of(case.experiment) as context:
        trial = trial_class(context, case)
        take_turns(trial, turns)
        pytorch.Trainer(trial, context).fit(
            max_length=case.experiment.max_length.unit(),
            reporting_period=training.reporting_period.unit(),
            checkpoint_policy="none",
        )
        return trial.model


def ours(case: Case, turns: Turns) -> nn.Module:
    """`trials.mlp` in Determined's loop, with audit, guard, counters and reports."""
    trial = train_in_turns(case.experiment, turns)
    assert isinstance(trial, MLPTrial)
    return trial.model


# Overrides with which an experiment trains until its turns are over.
ENDLESS = tuple(
    f"hyperparameters.training.{name}={{batches: 1000000}}"
    for name in ("max_length", "validation_period", "checkpoint_period")
)


def train_in_turns(experiment: Experiment, turns: Turns) -> pytorch.PyTorchTrial:
    """Train the trial of an experiment in Determined's loop, by turns; return it."""
    with context_of(experiment) as context:
        trial = trial_of(experiment, context)
        take_turns(trial, turns)
        fit(trial, context, checkpoint_policy="none")
        return trial


def take_turns(trial: pytorch.PyTorchTrial, turns: Turns) -> None:
    """Make a trial train by turns, and end when they are over."""
    train_batch = trial.train_batch

    def in_turn(*arguments: Any, **named: Any) -> Any:
        amp = amp_of(trial.context)  # type: ignore[attr-defined]  # as every trial here
        if amp is None or not amp.is_rehearsing:  # the audit rehearses the first batch
            turns.batch_begins()
        if turns.over:
            raise pytorch._ShouldExit(skip_exit_checkpoint=True)
        return train_batch(*arguments, **named)

    trial.train_batch = in_turn  # type: ignore[method-assign]  # of this object
