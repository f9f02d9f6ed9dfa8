"""What mixed precision must not change: each run against a plain loop, to the bit.

Everything here is on one thread of a CPU, where a sum has one order; so two loops that do the same
arithmetic have the same bits, and no comparison of whole runs needs a tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.nn import functional

from determined_amp.amp.settings import AmpSettings, OnOverflow, Precision
from determined_amp.experiment import experiment
from determined_amp.experiment.overrides import with_overrides
from determined_amp.trial.mixed_precision import MixedPrecision
from tests import training
from tests.one_weight import AMP, OneWeightTrial, Recipe, run
from tests.test_metrics import Context
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
LOOSE_CLIP = ("hyperparameters.max_grad_norm=1.0e+6",)
TIGHT_CLIP = ("hyperparameters.max_grad_norm=0.125",)

Autocast = Callable[[], AbstractContextManager[Any]]
Config = experiment.Experiment[Any]


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

    def run(self, autocast: Autocast = nullcontext) -> PlainLoop:
        """Train without a scaler."""
        frequency = self.hparams.aggregation_frequency
        for index, (images, labels) in enumerate(self.batches()):
            with autocast():
                loss = functional.cross_entropy(self.model(images / 127.5 - 1.0), labels)
            torch.autograd.backward(loss)
            if (index + 1) % frequency == 0:
                self.average()
                self.clip()
                self.optimizer.param_groups[0]["lr"] = self.rate()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.steps += 1
        return self

    def run_scaled(self, scaler: torch.amp.GradScaler) -> PlainLoop:
        """Train as torch's documentation of `GradScaler` does."""
        frequency = self.hparams.aggregation_frequency
        for index, (images, labels) in enumerate(self.batches()):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = functional.cross_entropy(self.model(images / 127.5 - 1.0), labels)
            torch.autograd.backward(scaler.scale(loss))
            if (index + 1) % frequency == 0:
                self.average()
                scaler.unscale_(self.optimizer)
                self.clip()
                self.optimizer.param_groups[0]["lr"] = self.rate()
                before = scaler.get_scale()
                scaler.step(self.optimizer)
                scaler.update()
                self.optimizer.zero_grad()
                self.steps += scaler.get_scale() >= before
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
    def test_is_the_plain_loop(
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

    def test_clip_that_nothing_reaches_changes_nothing(self) -> None:
        """`clip_grad_norm_` multiplies by min(1, 10^6 / norm) = 1, which is exact."""
        loose, none = (
            PlainLoop(parsed("mlp/fp32.yaml", clip)).run() for clip in (LOOSE_CLIP, NO_CLIP)
        )
        assert loose.digest() == none.digest()

    def test_loose_clip_of_the_trial_is_no_clip(self, tmp_path: Path) -> None:
        loose = trained("mlp/fp32.yaml", tmp_path, *LOOSE_CLIP)
        assert digest(loose) == PlainLoop(parsed("mlp/fp32.yaml", NO_CLIP)).run().digest()

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
        autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        reference = PlainLoop(parsed("mlp/bf16.yaml", overrides))
        found = digest(trained("mlp/bf16.yaml", tmp_path, *overrides))
        assert found == reference.run(autocast).digest()
        assert found != PlainLoop(parsed("mlp/fp32.yaml", overrides)).run().digest()

    @pytest.mark.parametrize("overrides", [NO_CLIP, RICH], ids=["plain", "rich"])
    def test_fp16_is_a_plain_scaled_loop(self, tmp_path: Path, overrides: tuple[str, ...]) -> None:
        """Skipped steps and a growing scale included.

        The largest gradient of a parameter at scale 1 is 0.085 plain and 0.036 rich, which times
        the first scale of 2^21 is 1.8e5 and 7.6e4, beyond 65504. Two good steps double the scale.
        """
        scale = ("hyperparameters.amp.init_scale=2097152", "hyperparameters.amp.growth_interval=2")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=2)
        reference = PlainLoop(parsed("mlp/amp.yaml", (*overrides, *scale))).run_scaled(scaler)
        attempted = BATCHES // reference.hparams.aggregation_frequency
        assert 0 < reference.steps < attempted, "steps of both kinds"

        found = trained("mlp/amp.yaml", tmp_path, *overrides, *scale)
        assert digest(found) == reference.digest()
        assert found["scaler_state_dict"]["scale"] == scaler.get_scale()
        (counts,) = found["callbacks"]["determined_amp.mixed_precision"]["optimizers"]
        assert counts["applied"] == reference.steps
        assert counts["attempted"] == attempted


SMALLEST_NORMAL, LARGEST = torch.finfo(torch.float16).tiny, torch.finfo(torch.float16).max


def with_scale(scale: float) -> tuple[str, ...]:
    """Batches of 8: a sample weighs 50 times what it does in one of 400."""
    return (
        *RICH,
        "hyperparameters.global_batch_size=8",
        f"hyperparameters.amp.init_scale={scale}",
        f"hyperparameters.amp.min_scale={min(scale, 1.0)}",
    )


def scaled_gradients(scale: float) -> torch.Tensor:
    """The magnitude of every nonzero gradient that a run computes in float16."""
    loop = PlainLoop(parsed("mlp/amp.yaml", with_scale(scale)))
    seen: list[torch.Tensor] = []
    for layer in loop.model[1:]:
        layer.register_full_backward_pre_hook(lambda layer, outputs: seen.extend(outputs))
    for parameter in loop.model.parameters():
        parameter.register_hook(seen.append)  # type: ignore[no-untyped-call]  # torch's has no types
    loop.run_scaled(torch.amp.GradScaler("cpu", init_scale=scale))
    magnitudes = torch.cat([gradient.detach().abs().flatten().float() for gradient in seen])
    return magnitudes[magnitudes > 0]


class TestLossScale:
    """A power of two moves the exponent alone, unless float16 runs out of exponents."""

    @pytest.mark.parametrize("scale", [2.0**8, 2.0**16])
    def test_of_this_size_neither_underflows_nor_overflows(self, scale: float) -> None:
        """The premise of the next test: every gradient is a normal number of float16."""
        gradients = scaled_gradients(scale)
        assert len(gradients) > 10_000
        assert gradients.min() >= SMALLEST_NORMAL
        assert gradients.max() <= LARGEST

    def test_does_not_change_the_weights(self, tmp_path: Path) -> None:
        small, large = (
            digest(trained("mlp/amp.yaml", tmp_path / f"{scale:g}", *with_scale(scale)))
            for scale in (2.0**8, 2.0**16)
        )
        assert small == large

    def test_that_underflows_would_be_seen(self, tmp_path: Path) -> None:
        """Negative control: at 2^-4 gradients fall below 2^-14 and lose bits."""
        assert scaled_gradients(2.0**-4).min() < SMALLEST_NORMAL
        small, large = (
            digest(trained("mlp/amp.yaml", tmp_path / f"{scale:g}", *with_scale(scale)))
            for scale in (2.0**-4, 2.0**16)
        )
        assert small != large

    @pytest.mark.parametrize("scale", [2.0**8, 2.0**16])
    def test_does_not_change_one_weight(self, folder: Path, scale: float) -> None:
        """Gradients 1/4, 1/8, 1/2 at rate 1/2: w = 1 - 7/16.

        The largest number in float16 is the scaled gradient of each of two outputs, 2^16 / 2.
        """
        amp = AmpSettings(Precision.AMP_FP16, init_scale=scale)
        trial = run(Recipe([[x, x] for x in (0.25, 0.125, 0.5)], amp), folder).trial
        assert trial.weights == [0.875, 0.8125, 0.5625]


def require_fused(optimizer_class: Any) -> None:
    """Skip the test unless this torch has the fused kernel of this optimizer for a CPU."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    try:
        optimizer_class([parameter], lr=0.1, fused=True).step()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch {torch.__version__} has no fused kernel for a CPU: {error}"[:150])


STEPS = 24


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Five steps of warm-up, and a cosine to the end."""
    return warmup_then(optimizer, LRSchedule.COSINE, warmup_steps=5, total_steps=STEPS)


def rates(learning_rate: float) -> list[float]:
    """Those of `cosine` for every step, of an optimizer that never skips one."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=learning_rate)
    scheduler = cosine(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


RATES = rates(0.3)

# However many steps are skipped.
ON_AND_ON = dataclasses.replace(AMP, on_overflow=OnOverflow.WARN)


class ScheduledTrial(OneWeightTrial):
    """Follows `RATES`.

    Attributes:
        used: The rate of every step that the optimizer applied.
    """

    def __init__(self, context: Any, recipe: Recipe) -> None:
        super().__init__(context, recipe)
        self.schedule()
        self.used: list[float] = []
        self.optimizer.register_step_pre_hook(self.note_rate)

    def schedule(self) -> None:
        self.amp.wrap_lr_scheduler(cosine(self.optimizer))

    def note_rate(self, optimizer: Any, *arguments: Any) -> None:
        # A fused optimizer is called on an overflow, too, and skips the step by this flag.
        if not getattr(optimizer, "found_inf", False):
            self.used.append(float(optimizer.param_groups[0]["lr"]))


class DriftingTrial(ScheduledTrial):
    """Planted: the schedule moves with the attempted steps, as Determined's own does."""

    def schedule(self) -> None:
        scheduler: Any = cosine(self.optimizer)
        every_step = pytorch.LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP
        self.context.wrap_lr_scheduler(scheduler, every_step)


def random_overflows(seed: int) -> list[list[float]]:
    """24 batches; with seed 0 all are good, with seed 9 nine in ten overflow."""
    draw = random.Random(seed)
    return [[math.inf if draw.random() < seed / 10 else 1.0] for _ in RATES]


class TestLearningRate:
    @pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
    @pytest.mark.parametrize("seed", range(10))
    def test_of_every_applied_step_is_that_of_the_schedule(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, fused: bool
    ) -> None:
        """`lr_drift` is 0: the k-th applied step uses rate k, however many were skipped before.

        The weight says the same: from 1, less each rate rounded to float32, the gradient being 1.
        """
        if fused:
            require_fused(torch.optim.SGD)
            fused_sgd = functools.partial(torch.optim.SGD, fused=True)
            monkeypatch.setattr(torch.optim, "SGD", fused_sgd)
        xs = random_overflows(seed)
        applied = sum(map(math.isfinite, itertools.chain(*xs)))
        made = run(Recipe(xs, ON_AND_ON, learning_rate=0.3), folder, ScheduledTrial)
        assert isinstance(made.trial, ScheduledTrial)
        assert made.trial.used == RATES[:applied]
        assert made.reports[-1]["watch_applied_steps"] == applied
        left = float(made.trial.optimizer.param_groups[0]["lr"])
        assert left == RATES[min(applied, len(RATES) - 1)]
        weight = functools.reduce(lambda w, rate: w - torch.tensor(rate), RATES[:applied], ONE)
        assert made.trial.weight() == weight

    # torch says so, too, where the first step is skipped.
    @pytest.mark.filterwarnings(r"ignore:Detected call of .lr_scheduler\.step:UserWarning")
    @pytest.mark.parametrize("seed", range(1, 10))
    def test_that_drifts_would_be_seen(self, folder: Path, seed: int) -> None:
        """Negative control: after the first skipped step every rate is a later one's."""
        xs = random_overflows(seed)
        made = run(Recipe(xs, ON_AND_ON, learning_rate=0.3), folder, DriftingTrial)
        trial = made.trial
        assert isinstance(trial, DriftingTrial)
        good = [step for step, (x,) in enumerate(xs) if math.isfinite(x)]
        assert trial.used == [RATES[step] for step in good]
        assert good != list(range(len(good)))
        assert made.reports[-1]["watch_lr_drift_steps"] == len(xs) - len(good)


ONE = torch.ones(())


def stepped(optimizer_class: Any, *, fused: bool) -> tuple[nn.Parameter, Any, MixedPrecision]:
    """8 steps on given gradients, the third and the sixth of which overflow in one element."""
    context: Any = Context()
    amp = MixedPrecision(context, AMP)
    parameter = nn.Parameter(torch.linspace(-1, 1, 1001))
    optimizer = context.wrap_optimizer(optimizer_class([parameter], lr=0.3, fused=fused))
    amp.wrap_lr_scheduler(cosine(optimizer))
    amp.on_training_start()
    generator = torch.Generator().manual_seed(0)
    for step in range(8):
        gradient = torch.rand(1001, generator=generator) - 0.5
        gradient[7] = math.inf if step in (2, 5) else 0.25
        parameter.grad = amp.scaler.scale(gradient)
        amp.scaler.unscale_(optimizer)
        amp.scaler.step(optimizer)
        amp.update()
    return parameter, optimizer.state[parameter], amp


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD])
def test_fused_optimizer_is_the_unfused_one(optimizer_class: Any) -> None:
    """Same skips, counts and scale; the weights to the rounding of another order of operations.

    A step changes a weight by at most 0.75: with SGD by rate * |g| <= 0.15, with Adam by
    rate * |m| / sqrt(v) <= 0.3 * sqrt(6), since after t <= 6 steps the bias-corrected moments obey
    |m| <= max |g| <= sqrt(t * v). Some ten operations make the change, another adds it to a weight
    of at most 2; each rounds by 2^-24 of its result, and 6 steps are applied.
    """
    require_fused(optimizer_class)
    plain, plain_state, plain_amp = stepped(optimizer_class, fused=False)
    fused, fused_state, fused_amp = stepped(optimizer_class, fused=True)
    assert int(plain_amp.applied_steps) == int(fused_amp.applied_steps) == 6
    assert float(plain_amp.loss_scale()) == float(fused_amp.loss_scale())
    assert plain_state.get("step") == fused_state.get("step")
    assert torch.isfinite(fused).all()
    torch.testing.assert_close(fused, plain, rtol=0, atol=6 * (2 + 10 * 0.75) * 2.0**-24)
