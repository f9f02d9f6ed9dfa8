"""Mixed precision in a plain PyTorch loop: `python plain.py`.

You can stop it at any time. Started again, it continues from state.pt to the same bits.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from determined_amp import AmpLoop, AmpSettings, Precision

BATCHES, REPORT_EVERY, SAVE_EVERY = 200, 25, 50

Batch = tuple[torch.Tensor, torch.Tensor]


def batch_of(step: int, device: torch.device) -> Batch:
    """Make the batch of a step, the same in every run: 64 points of four classes."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x.to(device), x[:, :4].argmax(1).to(device)


def train(settings: AmpSettings, saved: Path) -> nn.Module:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    amp = AmpLoop(settings, device)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    model = amp.prepare(net).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=amp.fused)
    amp.wrap_lr_scheduler(torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, BATCHES))

    def loss_fn(batch: Batch) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(model(x), y)

    step = 0
    if saved.exists():
        state = torch.load(saved, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])  # after the optimizer
        step = state["step"]

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
            metrics = amp.report(batch, loss_fn)  # one synchronisation; the guard
            print(step, {name: round(value, 4) for name, value in metrics.items()})
        if step % SAVE_EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"amp": amp.state_dict(), "step": step}
            partial = saved.with_suffix(".partial")
            torch.save(state, partial)
            partial.replace(saved)  # a kill leaves the old state or the new one
    return model


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    train(AmpSettings(Precision.AMP_FP16), Path("state.pt"))
