"""What mixed precision must not change: a run of the command against a plain loop, to
the bit.

Everything here is on one thread of a CPU, where a sum has one order; so two loops that
do the same arithmetic have the same bits, and no comparison of whole runs needs a
tolerance.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from tests import loops, training
from tests.harness import needs_fused, same_bits
from tests.trials import ByHand
from trials.data import images as data
from trials.data.loading import EpochSampler
from trials.schedule import LRSchedule, warmup_then

# 1437 training images make 3 batches of 400 per epoch and leave 237 over: 12 batches
# are 4 epochs.
FOUR_EPOCHS = (
    "hyperparameters.global_batch_size=400",
    "hyperparameters.max_grad_norm=0.125",
    "hyperparameters.lr_schedule=cosine",
    "hyperparameters.warmup_steps=2",
)
# The first steps overflow, and two good ones double the scale.
LOUD = (
    "hyperparameters.amp.init_scale=2097152",
    "hyperparameters.amp.growth_interval=2",
)


def trained_by_hand(config: experiment.Experiment) -> tuple[dict[str, Any], float]:
    """What one would write without this repository: the weights, and the loss scale."""
    assert config.amp is not None
    torch.manual_seed(config.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.hparams.learning_rate)
    amp = loops.TorchAmp(config.amp)
    amp.wrap_lr_scheduler(
        warmup_then(optimizer, LRSchedule.COSINE, warmup_steps=2, total_steps=12)
    )
    images, _ = data.load(config.data, config.seed)
    sampler = EpochSampler(len(images), config.seed)
    for _ in range(4):
        order = list(sampler)
        for start in (0, 400, 800):
            pixels, labels = images.__getitems__(order[start : start + 400])
            with amp.autocast():
                loss = functional.cross_entropy(model(pixels / 127.5 - 1.0), labels)
            torch.autograd.backward(amp.scaler.scale(loss))
            amp.clip_gradients(optimizer, 0.125)
            amp.scaler.step(optimizer)
            optimizer.zero_grad()
            amp.update(loss)
    return model.state_dict(), amp.loss_scale()


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("fp32", ()), ("bf16", ()), ("amp", LOUD)],
    ids=["fp32", "bf16", "fp16"],
)
def test_command_trains_as_torchs_own_loop(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    path, changes = f"mlp/{name}.yaml", (*FOUR_EPOCHS, *overrides)
    raw = experiment.read_yaml(str(training.ROOT / "experiment_configs" / path))
    config = experiment.parse(with_overrides(raw, (*training.SMALL, *changes)), path)
    weights, scale = trained_by_hand(config)
    saved = training.checkpoint(training.run_small(path, tmp_path, *changes), 12)
    assert same_bits(weights, saved["models_state_dict"][0])
    assert saved.get("scaler_state_dict", {"scale": 1.0})["scale"] == scale


STEPS = 24


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Five steps of warm-up, and a cosine to the end."""
    return warmup_then(optimizer, LRSchedule.COSINE, warmup_steps=5, total_steps=STEPS)


def stepped(optimizer_class: Any, *, fused: bool) -> ByHand:
    """8 steps on given gradients, the third and the sixth of which overflow in one
    element.
    """
    optimizer = functools.partial(optimizer_class, lr=0.3, fused=fused)
    made = ByHand(optimizer, weight=torch.linspace(-1, 1, 1001), make_scheduler=cosine)
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        gradient = torch.rand(1001, generator=generator) - 0.5
        gradient[7] = math.inf if step in (2, 5) else 0.25
        made.step(gradient, unscales=True)
    return made


@needs_fused
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD])
def test_fused_optimizer_trains_as_the_unfused_one(optimizer_class: Any) -> None:
    """Same skips, counts and scale; the weights to the rounding of another order of
    operations.

    A step changes a weight by at most 0.75: with SGD by rate * |g| <= 0.15, with Adam
    by rate * |m| / sqrt(v) <= 0.3 * sqrt(6), since after t <= 6 steps the
    bias-corrected moments obey |m| <= max |g| <= sqrt(t * v). Some ten operations make
    the change, another adds it to a weight of at most 2; each rounds by 2^-24 of its
    result, and 6 steps are applied.
    """
    plain, fused = (stepped(optimizer_class, fused=fused) for fused in (False, True))
    assert int(plain.amp.applied_steps) == int(fused.amp.applied_steps) == 6
    assert float(plain.amp.loss_scale()) == float(fused.amp.loss_scale())
    states = [made.optimizer.state[made.weight] for made in (plain, fused)]
    assert states[0].get("step") == states[1].get("step")
    assert torch.isfinite(fused.weight).all()
    tolerance = 6 * (2 + 10 * 0.75) * 2.0**-24
    torch.testing.assert_close(fused.weight, plain.weight, rtol=0, atol=tolerance)
