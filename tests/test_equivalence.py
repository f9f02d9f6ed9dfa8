"""What mixed precision must not change: a run of the command against a plain loop, to
the bit.

Everything here is on one thread of a CPU, where a sum has one order; so two loops that
do the same arithmetic have the same bits, and no comparison of whole runs needs a
tolerance.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from tests import loops, run_here
from tests.harness import same_bits
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


def trained_by_hand(config):
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
def test_command_trains_as_torchs_own_loop(name, overrides, tmp_path):
    path, changes = f"mlp/{name}.yaml", (*FOUR_EPOCHS, *overrides)
    raw = experiment.read_yaml(str(run_here.ROOT / "experiment_configs" / path))
    config = experiment.parse(with_overrides(raw, (*run_here.SMALL, *changes)), path)
    weights, scale = trained_by_hand(config)
    saved = run_here.checkpoint(run_here.run_small(path, tmp_path, *changes), 12)
    assert same_bits(weights, saved["models_state_dict"][0])
    assert saved.get("scaler_state_dict", {"scale": 1.0})["scale"] == scale
