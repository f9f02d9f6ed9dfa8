"""A trial with one weight, whose every number can be written down.

The model is y = w x and the loss is the mean of y over the batch, so the gradient is
dL/dw = mean(x) whatever w is, and SGD moves w by -learning_rate * mean(x). Powers of two are exact
in float16, so in every precision the weight is exact too. A batch with x = inf makes the gradient
non-finite at every loss scale: exactly those steps are skipped.

The recipe is the one of the real trials, word for word (`test_docs.py` holds them together).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from determined import core, pytorch
from determined.common import storage
from torch import nn
from torch.utils.data import TensorDataset

from determined_amp.amp.settings import AmpSettings, Precision
from determined_amp.trial.determined_0_38 import SafeController, controlled_by
from determined_amp.trial.mixed_precision import MixedPrecision
from tests.loops import Reports

AMP = AmpSettings(Precision.AMP_FP16, init_scale=4.0, growth_interval=2)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What one run of the trial is given; the names are those of the YAMLs.

    Args:
        xs: The inputs, one row per batch.
    """

    xs: Sequence[Sequence[float]]
    amp: AmpSettings = AMP
    aggregation_frequency: int = 1
    learning_rate: float = 0.5
    max_norm: float = math.inf


class OneWeightTrial(pytorch.PyTorchTrial):
    """y = w x, from w = 1.

    Attributes:
        scales: Loss scale after every batch.
        weights: w after every batch.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext, recipe: Recipe) -> None:
        self.context = context
        self.hparams = recipe
        self.amp = MixedPrecision(context, recipe.amp)
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        self.model = context.wrap_model(self.amp.prepare(model))
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(self.model.parameters(), lr=recipe.learning_rate)
        )
        self.scales: list[float] = []
        self.weights: list[float] = []

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        reported = self.train_on(batch)
        self.scales.append(float(self.amp.loss_scale()))
        self.weights.append(self.weight())
        return reported

    def train_on(self, batch: Any) -> dict[str, float]:
        (x,) = batch  # (B, 1)
        with self.amp.autocast():
            loss = self.model(x).float().mean()
        self.context.backward(self.amp.scaler.scale(loss))  # torch's GradScaler
        self.context.step_optimizer(  # scaler.step(optimizer), where a window of batches ends
            self.optimizer,
            clip_grads=self.amp.clip(self.optimizer, self.hparams.max_norm),  # after unscale_
            scaler=self.amp.scaler,
        )
        return self.amp.update(loss, samples=len(x))  # scaler.update(), counts, metrics

    def weight(self) -> float:
        return float(next(self.model.parameters()).detach())

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return self._loader(self.hparams.xs)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return self._loader([[0.0]] * self.context.distributed.size)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)

    @staticmethod
    def _loader(xs: Sequence[Sequence[float]]) -> pytorch.DataLoader:
        (size,) = {len(batch) for batch in xs}
        return pytorch.DataLoader(TensorDataset(torch.tensor(xs).reshape(-1, 1)), batch_size=size)


class NewTrial(SafeController):
    """The loop of a trial that is not the one whose checkpoint it starts from."""

    _ids = itertools.count(1)

    def __init__(self, **fitted: Any) -> None:
        super().__init__(**fitted)
        self.trial_id = next(self._ids)


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left: the trial, its reports, and the content of its last checkpoint."""

    trial: OneWeightTrial
    reports: list[dict[str, Any]]
    checkpoint: dict[str, Any]


def run(
    recipe: Recipe,
    folder: Path,
    trial_class: type[OneWeightTrial] = OneWeightTrial,
    *,
    resume: str | None = None,
    processes: core.DistributedContext | None = None,
) -> Run:
    """Train on every batch of `recipe` in Determined's loop, with one report and one checkpoint.

    Args:
        recipe: The run.
        folder: Where checkpoints are.
        trial_class: The trial, or one with a planted bug.
        resume: Name of a checkpoint in `folder` to warm-start from.
        processes: The ranks, which take the batches in turn; by default there is one.
    """
    distributed = processes or core.DummyDistributedContext()
    reports = Reports()
    core_context = core.Context(
        checkpoint=core.DummyCheckpointContext(
            distributed, storage.SharedFSStorageManager(str(folder))
        ),
        distributed=distributed,
        train=reports,
    )
    before = set(folder.iterdir())
    with core_context, controlled_by(NewTrial):
        context = pytorch.PyTorchTrialContext(
            core_context=core_context,
            trial_seed=0,
            hparams={"global_batch_size": len(recipe.xs[0]) * distributed.size},
            slots_per_trial=distributed.size,
            num_gpus=0,
            exp_conf={},
            aggregation_frequency=recipe.aggregation_frequency,
            steps_completed=0,
            managed_training=True,
            debug_enabled=False,
            enable_tensorboard_logging=False,
        )
        trial = trial_class(context, recipe)
        length = pytorch.Batch(len(recipe.xs) // distributed.size)
        pytorch.Trainer(trial, context).fit(
            max_length=length,
            reporting_period=length,
            checkpoint_policy="none",
            latest_checkpoint=resume,
        )
    saved = [
        torch.load(path / "state_dict.pth", weights_only=True)
        for path in set(folder.iterdir()) - before
    ]
    return Run(trial, reports.training, saved[0] if saved else {})
