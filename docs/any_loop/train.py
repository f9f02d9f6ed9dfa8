"""Mixed precision in your own loop with the Core API, on a cluster or without one.

cluster:     det experiment create any_loop.yaml .
no cluster:  python train.py
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import determined as det
import torch
from determined import core
from torch import nn
from torch.nn import functional

from determined_amp import AmpLoop, AmpSettings, GuardError

BATCHES, REPORT_EVERY, CHECKPOINT_EVERY = 200, 25, 50


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def batch_of(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the batch of a step, the same in every run: 64 points of four classes."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x.to(device), x[:, :4].argmax(1).to(device)


def train(
    core_context: core.Context,
    settings: AmpSettings,
    latest_checkpoint: str | None = None,
) -> nn.Module:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    amp = AmpLoop(settings, device, slots=core_context.distributed)
    model = amp.prepare(net()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=amp.fused)
    amp.wrap_lr_scheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, BATCHES))

    def loss_fn(batch: Any) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(model(x), y)

    def save() -> None:
        state: dict[str, Any] = {"model": model.state_dict()}
        with core_context.checkpoint.store_path({"steps_completed": step}) as (path, _):
            state |= {"optimizer": optimizer.state_dict()}
            state |= {"amp": amp.state_dict(), "step": step}
            torch.save(state, path / "state.pt")

    def load(path: Path) -> int:
        state = torch.load(path / "state.pt", weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])  # after the optimizer
        return int(state["step"])

    step = 0
    if latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(latest_checkpoint) as path:
            step = load(path)

    while step < BATCHES:
        batch = batch_of(step, device)
        with amp.autocast():
            loss = loss_fn(batch)
        amp.scaler.scale(loss).backward()
        amp.clip_gradients(optimizer, max_norm=1.0)  # unscale_, clip, norm
        amp.scaler.step(optimizer)
        optimizer.zero_grad()
        amp.update(loss, samples=len(batch[1]))  # scaler.update(), counts, schedule
        step += 1

        if step % REPORT_EVERY == 0:
            try:
                metrics = amp.report(batch, loss_fn)  # one synchronisation; the guard
            except GuardError as error:
                core_context.train.report_training_metrics(step, error.metrics)
                if error.state_is_good:
                    save()
                raise
            core_context.train.report_training_metrics(step, metrics)
            core_context.train.report_progress(step / BATCHES)
        if step % CHECKPOINT_EVERY == 0:
            save()
            if core_context.preempt.should_preempt():  # paused, or its slots are needed
                return model

    with torch.no_grad(), amp.eval_autocast():
        validation_loss = loss_fn(batch_of(BATCHES, device))
    validated = {"validation_loss": float(validation_loss)}
    core_context.train.report_validation_metrics(step, validated)
    return model


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    info = det.get_cluster_info()  # None without a cluster
    section = info.trial.hparams["amp"] if info else {"precision": "amp_fp16"}
    with core.init() as core_context:
        newest = info.latest_checkpoint if info else None
        train(core_context, AmpSettings(**section), newest)
