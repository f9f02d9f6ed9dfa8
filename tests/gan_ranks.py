"""A trial with two models and two optimizers; run by torchrun it says what each rank saw."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from determined import pytorch
from torch import distributed, nn
from torch.utils.data import TensorDataset

from determined_amp import MixedPrecision
from determined_amp.amp import guard
from determined_amp.local.processes import process_group
from tests.loops import fit

# Dealt to two ranks in turn.
ROWS = [(1.0, 1.0), (1.0, 1.0), (math.inf, 1.0), (1.0, 1.0), (1.0, 1.0), (3.0, 3.0)]


class TwoWeights(pytorch.PyTorchTrial):
    """A discriminator y = w_d x_d and a generator y = w_g x_g, both from w = 1, SGD with rate 0.5.

    Attributes:
        fused: Whether the optimizers are.
        how: Who steps: "context", or in batches of one "scaler" or "optimizer" alone.
        diagnosed: How often the guard trained a batch again.
        norms: Of the gradients that each batch stepped with, of both models.
    """

    how = "context"
    fused = False

    def __init__(
        self, context: pytorch.PyTorchTrialContext, rows: Sequence[tuple[float, float]]
    ) -> None:
        self.context = context
        self.rows = rows
        self.amp = MixedPrecision(context)
        self.diagnosed = 0
        self.norms: list[float] = []
        self.models, self.optimizers = [], []
        for _ in range(2):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            self.models.append(context.wrap_model(self.amp.prepare(model)))
            sgd = torch.optim.SGD(self.models[-1].parameters(), lr=0.5, fused=self.fused)
            self.optimizers.append(context.wrap_optimizer(sgd))

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        self.diagnosed += not self.amp._steps
        xs = batch
        losses = []
        for x, model, optimizer in zip(xs, self.models, self.optimizers, strict=True):
            with self.amp.autocast():
                losses.append(model(x).float().mean())
            self.context.backward(self.amp.scaler.scale(losses[-1]))
            if optimizer is self.optimizers[0] or self.steps_generator(batch_idx):
                self.step(optimizer)
        return self.amp.update(losses[0])

    def steps_generator(self, batch_idx: int) -> bool:
        return True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.amp._steps:
            (parameter,) = optimizer.param_groups[0]["params"]
            self.norms.append(float(parameter.grad))
        if self.how == "context":
            clip = self.amp.clip(optimizer)
            self.context.step_optimizer(optimizer, clip_grads=clip, scaler=self.amp.scaler)
            return
        self.amp.scaler.step(optimizer)
        if self.how == "optimizer" and not self.amp._steps:
            optimizer.step()  # a trial that steps by hand, whatever the guard wants
        optimizer.zero_grad()

    def weights(self) -> list[float]:
        return [float(next(model.parameters()).detach()) for model in self.models]

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        columns = torch.tensor(self.rows).T.reshape(2, -1, 1)
        return pytorch.DataLoader(TensorDataset(*columns), batch_size=1)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        zeros = torch.zeros(self.context.distributed.size, 1)
        return pytorch.DataLoader(TensorDataset(zeros, zeros), batch_size=1)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)


class Warnings(logging.Handler):
    """Keeps what the guard says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(folder: Path) -> None:
    work, checkpoints = folder / "work", folder / "checkpoints"
    work.mkdir(exist_ok=True)
    checkpoints.mkdir(exist_ok=True)
    os.chdir(work)  # which the loop copies into every checkpoint
    heard = Warnings()
    guard.logger.addHandler(heard)
    # It starts at its floor, where the guard warns of any skip.
    amp = {"precision": "amp_fp16", "init_scale": 4.0, "min_scale": 4.0, "on_overflow": "warn"}
    with process_group() as processes:
        made: Any = fit(
            lambda context: TwoWeights(context, ROWS),
            checkpoints,
            amp,
            batches=len(ROWS) // processes.size,
            batch_size=1,
            processes=processes,
        )
        counts = [int(made.trial.amp.steps(o).applied) for o in made.trial.optimizers]
        seen = {
            "rank": processes.rank,
            "weights": made.trial.weights(),
            "applied": counts,
            "diagnosed": made.trial.diagnosed,
            "warning": heard.lines[0],
        }
        sys.stdout.write(json.dumps(seen) + "\n")
        sys.stdout.flush()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
