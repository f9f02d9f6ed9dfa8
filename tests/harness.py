"""Determined's own loop for a small trial, and what a test asks of the run that it
left.

A typical test is three lines: `made = fit(Trial, FP16, batches=4)`, what `made` shows,
and the control. A run needs no folder: it saves where nobody looks, and `Fitted` knows
what was saved.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from determined import core, pytorch
from determined.common import storage
from torch import nn
from torch.utils.data import TensorDataset

from determined_amp import AmpSettings, ConfigError, MixedPrecision
from determined_amp.amp.fields import read_section
from determined_amp.amp.plain_data import Values
from determined_amp.trial.controller import SafeController
from determined_amp.trial.determined_private import controlled_by
from determined_amp.trial.make import make_with_amp
from tests.run_here import digest

_SAVED = tempfile.TemporaryDirectory(prefix="checkpoints-")
_RUNS, _TRIALS = itertools.count(), itertools.count(1)


class Reports(core.DummyTrainContext):
    """Keeps what the loop reports.

    Attributes:
        training: The training metrics, in order.
        validation: The validation metrics, in order.
    """

    def __init__(self):
        super().__init__()
        self.training = []
        self.validation = []

    def _report_trial_metrics(self, group, steps_completed, metrics, *others):
        (self.training if group == "training" else self.validation).append(
            dict(metrics)
        )


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a run left.

    Args:
        trial: The trial.
        context: Its context.
        reports: What it reported.
        batches: Its length.
        folder: Where its checkpoints are.
    """

    trial: Any
    context: pytorch.PyTorchTrialContext
    reports: Reports
    batches: int
    folder: Path

    @property
    def report(self):
        """Its last training report."""
        return self.reports.training[-1]

    @property
    def saved(self):
        """The folder of its last checkpoint."""
        own = (path for path in self.folder.iterdir() if not path.is_symlink())
        return max(own, key=lambda path: path.stat().st_mtime_ns)

    @property
    def checkpoint(self):
        """What is in its last checkpoint."""
        return content(self.saved)


def content(saved):
    """What is in a checkpoint, read without running code."""
    return torch.load(saved / "state_dict.pth", weights_only=True)


class _Loop(SafeController):
    """A loop that goes on after `first_batch`, as on a cluster; `Trainer` starts at 0
    without.
    """

    def __init__(self, first_batch, is_another_trial, **given):
        super().__init__(**{**given, "steps_completed": first_batch})
        if is_another_trial:
            self.trial_id = next(_TRIALS)


def core_context_of(folder, processes=None, reports=None):
    """A core context without a master, which saves in a folder."""
    distributed = processes or core.DummyDistributedContext()
    manager = storage.SharedFSStorageManager(str(folder))
    return core.Context(
        checkpoint=core.DummyCheckpointContext(distributed, manager),
        distributed=distributed,
        train=reports or Reports(),
    )


def context_of(
    core_context,
    hparams,
    *,
    exp_conf=None,
    gpus=0,
    aggregation_frequency=1,
    first_batch=0,
):
    """What `pytorch.init` gives a trial on a cluster."""
    searcher = {"name": "single", "metric": "validation_loss"}
    return pytorch.PyTorchTrialContext(
        core_context=core_context,
        trial_seed=0,
        hparams=dict(hparams),
        slots_per_trial=core_context.distributed.size,
        num_gpus=gpus,
        exp_conf=dict(exp_conf or {"searcher": searcher}),
        aggregation_frequency=aggregation_frequency,
        steps_completed=first_batch,
        managed_training=True,
        debug_enabled=False,
        enable_tensorboard_logging=False,
    )


def fit(
    make_trial,
    amp=None,
    *,
    batches,
    resume=None,
    warm_start=False,
    processes=None,
    reporting_period=1,
    checkpoint_period=None,
    validation_period=None,
    batch_size=4,
    hparams=None,
    loop=None,
    **of_the_context,
):
    """Train in Determined's `Trainer`.

    Args:
        make_trial: The trial's class or factory.
        amp: The section `hyperparameters.amp`; None leaves it out.
        batches: Length of the whole run.
        resume: The run to go on from.
        warm_start: Whether this is another trial, which takes weights alone from that
            run.
        processes: The ranks, which take the batches in turn; by default there is one.
        reporting_period: Batches.
        checkpoint_period: Batches; by default at the end only.
        validation_period: Batches; by default at the end only.
        batch_size: Of a slot.
        hparams: Other hyperparameters.
        loop: Determined's controller, or one that says what it does.
        of_the_context: See `context_of`.
    """
    folder = Path(_SAVED.name) / str(next(_RUNS))
    folder.mkdir(exist_ok=True)  # another rank may have made it
    if resume is not None:
        with suppress(FileExistsError):
            (folder / resume.saved.name).symlink_to(resume.saved)
    first_batch = 0 if resume is None or warm_start else resume.batches
    core_context = core_context_of(folder, processes)
    with core_context, controlled_by(loop or partial(_Loop, first_batch, warm_start)):
        size = batch_size * core_context.distributed.size
        section = {} if amp is None else {"amp": dict(amp)}
        everything = {"global_batch_size": size, **section, **(hparams or {})}
        torch.manual_seed(0)
        context = context_of(
            core_context, everything, first_batch=first_batch, **of_the_context
        )
        trial = make_trial(context)
        every = {"checkpoint": checkpoint_period, "validation": validation_period}
        periods: Values = {
            f"{name}_period": pytorch.Batch(period)
            for name, period in every.items()
            if period
        }
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(batches),
            reporting_period=pytorch.Batch(reporting_period),
            checkpoint_policy="none",
            latest_checkpoint=None if resume is None else resume.saved.name,
            **periods,
        )
    reports: Any = core_context.train
    return Fitted(trial, context, reports, batches, folder)


def as_it_is(trial, amp):
    """Makes a trial with mixed precision from outside; one that has its own is left
    alone.
    """
    settings = read_section(AmpSettings, amp, "amp")
    return lambda context: make_with_amp(trial, context, settings)


def fit_as_it_is(trial, amp, **options):
    """Train a trial whose code knows nothing of mixed precision, by default on 8
    batches.
    """
    return fit(as_it_is(trial, amp), amp, **{"batches": 8, **options})


def refusal(make_trial, amp, *, batches=2, **options):
    """What the run of a trial is refused with."""
    with pytest.raises(ConfigError) as raised:
        fit(make_trial, amp, batches=batches, **options)
    return str(raised.value)


def same_bits(*states):
    """Whether these are equal to the last bit: tensors, and containers and plain values
    of them.
    """
    return len({digest(state) for state in states}) == 1


def loader(rows):
    """Batches in order: each row is one, its numbers are its samples, (B, 1)
    float32.
    """
    (size,) = {len(row) for row in rows}
    samples = torch.tensor(rows, dtype=torch.float32).reshape(-1, 1)
    return pytorch.DataLoader(TensorDataset(samples), batch_size=size)


class _Processes:
    """What metrics and guard ask of the ranks."""

    rank = 0

    def __init__(self, size):
        self.size = size


class Context:
    """As much of a trial's context as metrics and mixed precision use, without a
    loop.
    """

    device = torch.device("cpu")
    _aggregation_frequency = 1
    _exp_conf = None
    _scaler = None
    _trial_seed = 7
    _current_batch_idx = None

    def __init__(self, slots=1):
        self.distributed = _Processes(slots)
        self._core = SimpleNamespace(train=core.DummyTrainContext())
        self.registered = []
        self.models = []
        self.optimizers = []
        self.lr_schedulers = []

    def step_optimizer(self, *given, **named):
        """Steps nothing."""

    def wrap_scaler(self, scaler):
        return scaler

    def wrap_optimizer(self, optimizer):
        self.optimizers.append(optimizer)
        return optimizer

    def wrap_reducer(self, reducer, **when):
        self.registered.append((reducer, when))
        return reducer


def batches_of(train_batch, settings):
    """A trial that has no model, and its mixed precision around its `train_batch`."""

    def train(batch, epoch_idx=0, batch_idx=0):
        return train_batch(batch)

    context: Any = Context()
    trial: Any = SimpleNamespace(train_batch=train, build_training_data_loader=list)
    amp = MixedPrecision(context, settings)
    amp.callbacks(trial)
    return trial, amp


def _has_fused_on_cpu():
    try:
        torch.optim.Adam([nn.Parameter(torch.ones(1))], fused=True)
    except RuntimeError:
        return False
    return True


FUSED_ON_CPU = _has_fused_on_cpu()
needs_fused = pytest.mark.skipif(
    not FUSED_ON_CPU, reason="this torch has no fused optimizers on a CPU"
)
EVERY_PRECISION = ("fp32", "tf32", "amp_fp16", "amp_bf16")
every_precision = pytest.mark.parametrize("precision", EVERY_PRECISION)
