"""What mixed precision must not change: each run against a plain loop, to the bit.

Everything here is on one thread of a CPU, where a sum has one order; so two loops that do the same
arithmetic have the same bits, and no comparison of whole runs needs a tolerance.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from tests import training
from tests.harness import needs_fused
from tests.trials import ByHand
from trials.data import images as data
from trials.data.loading import Batch, EpochSampler
from trials.mlp import MLPHparams
from trials.schedule import LRSchedule, warmup_then

BATCHES = 12

# 1437 training images make 3 batches of 400 per epoch and leave 237 over: 12 batches are 4 epochs.
# One report, validation and checkpoint, at the end.
FOUR_EPOCHS = (
    "hyperparameters.global_batch_size=400",
    f"hyperparameters.training.validation_period.batches={BATCHES}",
    f"hyperparameters.training.checkpoint_period.batches={BATCHES}",
    f"hyperparameters.training.reporting_period.batches={BATCHES}",
)

ACCUMULATION = ("hyperparameters.aggregation_frequency=2",)
COSINE = ("hyperparameters.lr_schedule=cosine", "hyperparameters.warmup_steps=2")
NO_CLIP = ("hyperparameters.max_grad_norm=null",)
TIGHT_CLIP = ("hyperparameters.max_grad_norm=0.125",)

Autocast = Callable[[], AbstractContextManager[Any]]
FLOAT16, BFLOAT16 = (
    functools.partial(torch.autocast, "cpu", dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16)
)
Config = experiment.Experiment


def parsed(config: str, overrides: Sequence[str]) -> Config:
    """The experiment that `training.run_small` trains."""
    path = str(training.ROOT / "experiment_configs" / config)
    raw = with_overrides(experiment.read_yaml(path), (*training.SMALL, *FOUR_EPOCHS, *overrides))
    found = experiment.parse(raw, path)
    assert isinstance(found.hparams, MLPHparams)
    return found


class PlainLoop:
    """What one would write without this repository: a model, Adam, and a loop over the batches."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.hparams = config.hparams
        torch.manual_seed(config.seed)
        self.model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(config.data.image_size**2, self.hparams.hidden_features),
            nn.ReLU(),
            nn.Linear(self.hparams.hidden_features, 10),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=self.hparams.learning_rate)
        self.steps = 0

    def batches(self) -> Iterator[Batch]:
        """The first 12 whole batches of consecutive passes, each in its own order."""
        images, _ = data.load(self.config.data, self.config.seed)
        size = self.hparams.global_batch_size
        sampler = EpochSampler(len(images), self.config.seed)
        passes = (list(sampler) for _ in itertools.count())
        starts = range(0, len(images) - size + 1, size)
        whole = (order[start : start + size] for order in passes for start in starts)
        return (images.__getitems__(samples) for samples in itertools.islice(whole, BATCHES))

    def rate(self) -> float:
        """Linear warm-up to the peak, then half a cosine to 0, in float64."""
        total = BATCHES // self.hparams.aggregation_frequency
        warmup: int = self.hparams.warmup_steps
        peak: float = self.hparams.learning_rate
        if self.steps < warmup:
            return peak * ((self.steps + 1) / (warmup + 1))
        if self.hparams.lr_schedule is LRSchedule.CONSTANT:
            return peak
        return peak * (1 + math.cos(math.pi * ((self.steps - warmup) / (total - warmup)))) / 2

    def clip(self) -> None:
        if self.hparams.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.hparams.max_grad_norm)

    def average(self) -> None:
        """Of the sum over a window, in one division, as Determined has it."""
        if self.hparams.aggregation_frequency > 1:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= self.hparams.aggregation_frequency

    def run(
        self, autocast: Autocast = nullcontext, scaler: torch.amp.GradScaler | None = None
    ) -> PlainLoop:
        """Train without a scaler, or with one as torch's documentation of `GradScaler` does."""
        frequency = self.hparams.aggregation_frequency
        for index, (images, labels) in enumerate(self.batches()):
            with autocast():
                loss = functional.cross_entropy(self.model(images / 127.5 - 1.0), labels)
            torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
            if (index + 1) % frequency == 0:
                self.average()
                if scaler is not None:
                    scaler.unscale_(self.optimizer)
                self.clip()
                self.optimizer.param_groups[0]["lr"] = self.rate()
                if scaler is None:
                    self.optimizer.step()
                    self.steps += 1
                else:
                    before = scaler.get_scale()
                    scaler.step(self.optimizer)
                    scaler.update()
                    self.steps += scaler.get_scale() >= before
                self.optimizer.zero_grad()
        return self

    def digest(self) -> str:
        """Of the weights and of Adam's moments and step counts."""
        return training.digest([self.model.state_dict(), self.optimizer.state_dict()["state"]])


def trained(config: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """The checkpoint of the real trial in Determined's loop."""
    training.run_small(config, folder, *FOUR_EPOCHS, *overrides)
    return training.checkpoint(folder, BATCHES)


def digest(checkpoint: dict[str, Any]) -> str:
    (weights,), (optimizer,) = checkpoint["models_state_dict"], checkpoint["optimizers_state_dict"]
    return training.digest([weights, optimizer["state"]])


class TestAmpOff:
    @pytest.mark.parametrize("schedule", [(), COSINE], ids=["constant", "cosine"])
    @pytest.mark.parametrize("clip", [NO_CLIP, TIGHT_CLIP], ids=["no clip", "clip"])
    @pytest.mark.parametrize("window", [(), ACCUMULATION], ids=["every batch", "every other"])
    def test_trial_without_amp_is_the_plain_loop(
        self,
        tmp_path: Path,
        window: tuple[str, ...],
        clip: tuple[str, ...],
        schedule: tuple[str, ...],
    ) -> None:
        """Without a scaler, autocast or schedule object anywhere in the reference."""
        overrides = (*window, *clip, *schedule)
        reference = PlainLoop(parsed("mlp/fp32.yaml", overrides)).run()
        assert digest(trained("mlp/fp32.yaml", tmp_path, *overrides)) == reference.digest()

    @pytest.mark.parametrize("change", [TIGHT_CLIP, COSINE, ACCUMULATION])
    def test_every_option_moves_the_weights(self, change: tuple[str, ...]) -> None:
        """Negative control: the clip is active, the schedule moves, the window counts."""
        plain, changed = (
            PlainLoop(parsed("mlp/fp32.yaml", (*NO_CLIP, *more))).run() for more in ((), change)
        )
        assert plain.digest() != changed.digest()


RICH = (*ACCUMULATION, *TIGHT_CLIP, *COSINE)


class TestAmpOn:
    @pytest.mark.parametrize("overrides", [NO_CLIP, RICH], ids=["plain", "rich"])
    def test_bf16_is_a_plain_autocast_loop(
        self, tmp_path: Path, overrides: tuple[str, ...]
    ) -> None:
        reference = PlainLoop(parsed("mlp/bf16.yaml", overrides))
        found = digest(trained("mlp/bf16.yaml", tmp_path, *overrides))
        assert found == reference.run(BFLOAT16).digest()
        assert found != PlainLoop(parsed("mlp/fp32.yaml", overrides)).run().digest()

    @pytest.mark.parametrize("overrides", [NO_CLIP, RICH], ids=["plain", "rich"])
    def test_fp16_is_a_plain_scaled_loop(self, tmp_path: Path, overrides: tuple[str, ...]) -> None:
        """Skipped steps and a growing scale included.

        The largest gradient of a parameter at scale 1 is 0.085 plain and 0.036 rich, which times
        the first scale of 2^21 is 1.8e5 and 7.6e4, beyond 65504. Two good steps double the scale.
        """
        scale = ("hyperparameters.amp.init_scale=2097152", "hyperparameters.amp.growth_interval=2")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=2)
        reference = PlainLoop(parsed("mlp/amp.yaml", (*overrides, *scale))).run(FLOAT16, scaler)
        attempted = BATCHES // reference.hparams.aggregation_frequency
        assert 0 < reference.steps < attempted, "steps of both kinds"

        found = trained("mlp/amp.yaml", tmp_path, *overrides, *scale)
        assert digest(found) == reference.digest()
        assert found["scaler_state_dict"]["scale"] == scaler.get_scale()
        (counts,) = found["callbacks"]["determined_amp.mixed_precision"]["optimizers"]
        assert counts["applied"] == reference.steps
        assert counts["attempted"] == attempted


STEPS = 24


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Five steps of warm-up, and a cosine to the end."""
    return warmup_then(optimizer, LRSchedule.COSINE, warmup_steps=5, total_steps=STEPS)


def stepped(optimizer_class: Any, *, fused: bool) -> ByHand:
    """8 steps on given gradients, the third and the sixth of which overflow in one element."""
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
def test_fused_optimizer_is_the_unfused_one(optimizer_class: Any) -> None:
    """Same skips, counts and scale; the weights to the rounding of another order of operations.

    A step changes a weight by at most 0.75: with SGD by rate * |g| <= 0.15, with Adam by
    rate * |m| / sqrt(v) <= 0.3 * sqrt(6), since after t <= 6 steps the bias-corrected moments obey
    |m| <= max |g| <= sqrt(t * v). Some ten operations make the change, another adds it to a weight
    of at most 2; each rounds by 2^-24 of its result, and 6 steps are applied.
    """
    plain, fused = (stepped(optimizer_class, fused=fused) for fused in (False, True))
    assert int(plain.amp.applied_steps) == int(fused.amp.applied_steps) == 6
    assert float(plain.amp.loss_scale()) == float(fused.amp.loss_scale())
    states = [made.optimizer.state[made.weight] for made in (plain, fused)]
    assert states[0].get("step") == states[1].get("step")
    assert torch.isfinite(fused.weight).all()
    tolerance = 6 * (2 + 10 * 0.75) * 2.0**-24
    torch.testing.assert_close(fused.weight, plain.weight, rtol=0, atol=tolerance)
