"""Determined's own loop for trials of a stranger's shape: no file of this repository around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from determined import core, pytorch
from determined.common import storage
from torch.utils.data import TensorDataset

from determined_amp.trial.determined_0_38 import SafeController, controlled_by

MakeTrial = Callable[[pytorch.PyTorchTrialContext], pytorch.PyTorchTrial]


class Reports(core.DummyTrainContext):
    """Keeps what the loop reports.

    Attributes:
        training: The training metrics, in order.
        validation: The validation metrics, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.training: list[dict[str, Any]] = []
        self.validation: list[dict[str, Any]] = []

    def _report_trial_metrics(
        self,
        group: str,
        steps_completed: int,
        metrics: dict[str, Any],
        batch_metrics: list[dict[str, Any]] | None = None,
    ) -> None:
        (self.training if group == "training" else self.validation).append(dict(metrics))


class FromBatch(SafeController):
    """A loop that goes on after `first_batch`, as on a cluster; `Trainer` starts at 0 without."""

    def __init__(self, first_batch: int, **fitted: Any) -> None:
        super().__init__(**{**fitted, "steps_completed": first_batch})


@dataclasses.dataclass(frozen=True)
class Fitted:
    """What a run left.

    Args:
        trial: The trial.
        context: Its context.
        reports: What it reported.
        checkpoint: The name of its last checkpoint, if it left one.
    """

    trial: Any
    context: pytorch.PyTorchTrialContext
    reports: Reports
    checkpoint: str | None


def make_context(
    core_context: core.Context,
    amp: Mapping[str, Any] | None,
    *,
    aggregation_frequency: int = 1,
    first_batch: int = 0,
    searcher: Mapping[str, Any] | None = None,
    batch_size: int = 4,
) -> pytorch.PyTorchTrialContext:
    """What `pytorch.init` gives a trial on a cluster."""
    slots = core_context.distributed.size
    hparams: dict[str, Any] = {"global_batch_size": batch_size * slots}
    if amp is not None:
        hparams["amp"] = dict(amp)
    torch.manual_seed(0)
    return pytorch.PyTorchTrialContext(
        core_context=core_context,
        trial_seed=0,
        hparams=hparams,
        slots_per_trial=slots,
        num_gpus=0,
        exp_conf={"searcher": dict(searcher or {"name": "single", "metric": "validation_loss"})},
        aggregation_frequency=aggregation_frequency,
        steps_completed=first_batch,
        managed_training=True,
        debug_enabled=False,
        enable_tensorboard_logging=False,
    )


def fit(
    make_trial: MakeTrial,
    folder: Path,
    amp: Mapping[str, Any] | None,
    *,
    batches: int,
    first_batch: int = 0,
    resume: str | None = None,
    reporting_period: int = 1,
    checkpoint_period: int | None = None,
    validation_period: int | None = None,
    processes: core.DistributedContext | None = None,
    **context_options: Any,
) -> Fitted:
    """Train in Determined's `Trainer`.

    Args:
        make_trial: The trial's class or factory.
        folder: Where checkpoints are.
        amp: The section `hyperparameters.amp`; None leaves it out.
        batches: Length of the whole run.
        first_batch: Batches trained before.
        resume: Name of the checkpoint to go on from.
        reporting_period: Batches.
        checkpoint_period: Batches; by default at the end only.
        validation_period: Batches; by default at the end only.
        processes: The ranks; by default there is one.
        context_options: See `make_context`.
    """
    distributed = processes or core.DummyDistributedContext()
    reports = Reports()
    checkpoints = core.DummyCheckpointContext(
        distributed, storage.SharedFSStorageManager(str(folder))
    )
    core_context = core.Context(checkpoint=checkpoints, distributed=distributed, train=reports)
    before = set(folder.iterdir())
    with core_context, controlled_by(partial(FromBatch, first_batch)):
        context = make_context(core_context, amp, first_batch=first_batch, **context_options)
        trial = make_trial(context)
        every = {"checkpoint": checkpoint_period, "validation": validation_period}
        periods: dict[str, Any] = {
            f"{name}_period": pytorch.Batch(period) for name, period in every.items() if period
        }
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(batches),
            reporting_period=pytorch.Batch(reporting_period),
            checkpoint_policy="none",
            latest_checkpoint=resume,
            **periods,
        )
    saved = sorted(set(folder.iterdir()) - before, key=lambda path: path.stat().st_mtime_ns)
    return Fitted(trial, context, reports, saved[-1].name if saved else None)


def content(folder: Path, checkpoint: str | None) -> dict[str, Any]:
    """What is in a checkpoint, read without running code."""
    assert checkpoint is not None
    found: dict[str, Any] = torch.load(folder / checkpoint / "state_dict.pth", weights_only=True)
    return found


def loader(rows: Sequence[Sequence[float]]) -> pytorch.DataLoader:
    """Batches in order: each row is one, its numbers are its samples, (B, 1) float32."""
    (size,) = {len(row) for row in rows}
    samples = torch.tensor(rows, dtype=torch.float32).reshape(-1, 1)
    return pytorch.DataLoader(TensorDataset(samples), batch_size=size)
