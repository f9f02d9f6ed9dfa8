"""Every torch scheduler in Determined's loop: a resumed run steps with the undisturbed rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.optim import lr_scheduler

from determined_amp import MixedPrecision
from tests.loops import Fitted, content, fit, loader

BATCHES = 12
Modes = pytorch.LRScheduler.StepMode

# Long enough that each changes several times within a run.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def settings(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Rate and momentum, or betas, of every group."""
    found: list[float] = []
    for group in optimizer.param_groups:
        found += [float(group["lr"]), float(group.get("momentum", 0)), *group.get("betas", ())]
    return tuple(found)


class Scheduled(pytorch.PyTorchTrial):
    """One weight, or two with an optimizer each; notes what every batch steps with.

    Its second batch overflows in float16.

    Args:
        context: The trial's context.
        make_optimizer: For every model.
        make_scheduler: For every optimizer; None leaves their rates alone.
        mode: Of `context.wrap_lr_scheduler`; None has the library wrap it.
        models: How many.
    """

    rows: tuple[tuple[float, ...], ...] = ((1.0,), (math.inf,), *((1.0,),) * (BATCHES - 2))

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        mode: Modes | None,
        models: int = 1,
    ) -> None:
        self.context = context
        self.amp = MixedPrecision(context)
        self.models, self.optimizers, self.schedulers = [], [], []
        self.seen: list[tuple[float, ...]] = []
        self.mode = mode
        for _ in range(models):
            model = context.wrap_model(nn.Linear(1, 1, bias=False))
            optimizer = context.wrap_optimizer(make_optimizer(model.parameters()))
            self.models.append(model)
            self.optimizers.append(optimizer)
            if make_scheduler is not None:
                self.schedulers.append(make_scheduler(optimizer))
        for scheduler in self.schedulers:
            if mode is None:
                self.amp.wrap_lr_scheduler(scheduler)
            else:
                context.wrap_lr_scheduler(scheduler, mode)

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        self.seen.append(sum(map(settings, self.optimizers), ()))
        (x,) = batch
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            with self.amp.autocast():
                loss = model(x).float().mean()
            self.context.backward(self.amp.scaler.scale(loss))
            self.context.step_optimizer(
                optimizer, clip_grads=self.amp.clip(optimizer), scaler=self.amp.scaler
            )
        reported = self.amp.update(loss)
        if self.mode is Modes.MANUAL_STEP:
            for scheduler in self.schedulers:
                if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    scheduler.step()
        return reported

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return {"validation_loss": 1.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        rows = self.rows if self.amp.settings.scales_the_loss else ((1.0,),) * BATCHES
        # Some schedules are by epochs: three of four batches, the second of each overflows.
        return loader(rows[:4] if self.mode is Modes.STEP_EVERY_EPOCH else rows)

    def build_validation_data_loader(self) -> pytorch.DataLoader:
        return loader([[0.0]])

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)


def runs(
    folder: Path, *arguments: Any, amp: str = "amp_fp16", **options: Any
) -> Callable[..., Fitted]:
    def make(context: pytorch.PyTorchTrialContext) -> Scheduled:
        return Scheduled(context, *arguments)

    def run(batches: int, first_batch: int = 0, resume: str | None = None) -> Fitted:
        scale = {"init_scale": 64.0} if amp == "amp_fp16" else {}
        section = {"precision": amp, **scale}
        return fit(
            make,
            folder,
            section,
            batches=batches,
            first_batch=first_batch,
            resume=resume,
            batch_size=1,
            **options,
        )

    return run


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch 2.3, in SequentialLR
@pytest.mark.parametrize(
    "mode", [None, *Modes], ids=lambda mode: "library" if mode is None else mode.name.lower()
)
@pytest.mark.parametrize(
    ("scheduler", "optimizer"),
    # Adam has betas in place of momentum, which this one scheduler moves, too.
    [*((scheduler, "SGD") for scheduler in SCHEDULERS), ("OneCycleLR", "AdamW")],
)
def test_resumed_run_steps_with_the_rates_of_an_undisturbed_one(
    folder: Path, scheduler: str, mode: Modes | None, optimizer: str
) -> None:
    run = runs(folder, OPTIMIZERS[optimizer], SCHEDULERS[scheduler], mode)
    undisturbed = run(BATCHES).trial.seen
    assert len(set(undisturbed)) > (1 if mode is Modes.STEP_EVERY_EPOCH else 2)
    for stop in (1, 2, 5):
        saved = run(stop).checkpoint
        assert run(BATCHES, stop, saved).trial.seen == undisturbed[stop:]


@pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
@pytest.mark.parametrize("mode", [None, Modes.STEP_EVERY_BATCH])
def test_two_optimizers_resume_each_with_its_own_schedule(
    folder: Path, mode: Modes | None, precision: str
) -> None:
    made = iter([SCHEDULERS["StepLR"], SCHEDULERS["OneCycleLR"]] * 20)

    def alternate(optimizer: torch.optim.Optimizer) -> Any:
        return next(made)(optimizer)

    run = runs(folder, OPTIMIZERS["SGD"], alternate, mode, 2, amp=precision)
    undisturbed = run(BATCHES).trial.seen
    for stop in (2, 7):
        saved = run(stop).checkpoint
        assert run(BATCHES, stop, saved).trial.seen == undisturbed[stop:]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first is skipped
@pytest.mark.parametrize("frequency", [1, 2])
def test_the_library_moves_it_with_applied_steps_and_the_context_with_all(
    folder: Path, frequency: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The second batch overflows: its step is skipped, and no rate is passed over for it."""
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.02, momentum=0.9)
    scheduler = SCHEDULERS["LambdaLR"](plain)
    rates = []
    for _ in range(BATCHES):
        rates.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    skipped = 1 if frequency == 1 else 0
    options: dict[str, Any] = {"aggregation_frequency": frequency}
    library = runs(folder, OPTIMIZERS["SGD"], SCHEDULERS["LambdaLR"], None, **options)(BATCHES)
    mode = Modes.STEP_EVERY_OPTIMIZER_STEP
    context = runs(folder, OPTIMIZERS["SGD"], SCHEDULERS["LambdaLR"], mode, **options)(BATCHES)

    def by_window(seen: list[tuple[float, ...]]) -> list[float]:
        return [rate for rate, *_ in seen[frequency - 1 :: frequency]]

    steps = BATCHES // frequency
    stands_still = [rates[max(0, step - (step > skipped))] for step in range(steps)]
    assert by_window(library.trial.seen) == stands_still
    assert by_window(context.trial.seen) == rates[:steps]
    assert "watch_lr_drift_steps" not in library.reports.training[-1]
    assert context.reports.training[-1]["watch_lr_drift_steps"] == 1
    assert caplog.text.count("amp.wrap_lr_scheduler moves it on applied steps only") == 1


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


class OwnPlateau(Scheduled):
    """Steps a `ReduceLROnPlateau` of its own after each validation, as Determined's docs show."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        trial = self

        class Stepper(pytorch.PyTorchCallback):
            def on_validation_end(self, metrics: dict[str, Any]) -> None:
                for scheduler in trial.schedulers:
                    scheduler.step(metrics["validation_loss"])

        return {**super().build_callbacks(), "stepper": Stepper()}


@pytest.mark.parametrize("trial_class", [Scheduled, OwnPlateau])
def test_plateau_resumes_its_rate_and_its_patience(
    folder: Path, trial_class: type[Scheduled]
) -> None:
    """The loss never improves: after the second validation each halves the rate."""
    mode = None if trial_class is Scheduled else Modes.MANUAL_STEP

    def run(batches: int, first_batch: int = 0, resume: str | None = None) -> Fitted:
        return fit(
            lambda context: trial_class(context, OPTIMIZERS["SGD"], plateau, mode),
            folder,
            {"precision": "amp_fp16", "init_scale": 4.0},
            batches=batches,
            first_batch=first_batch,
            resume=resume,
            batch_size=1,
            validation_period=2,
        )

    undisturbed = run(BATCHES).trial.seen
    rates = [rate for rate, _ in undisturbed]
    assert rates == [0.02 * 0.5 ** max(0, batch // 2 - 1) for batch in range(BATCHES)]
    for stop in (4, 8):
        saved = run(stop).checkpoint
        assert run(BATCHES, stop, saved).trial.seen == undisturbed[stop:]


def test_settings_that_the_yaml_changed_win_over_the_checkpoint(folder: Path) -> None:
    """Without a scheduler: the new rate and decay, not those of the checkpoint."""

    class Unscheduled(Scheduled):
        def __init__(self, context: pytorch.PyTorchTrialContext, rate: float) -> None:
            self.rate = rate
            super().__init__(context, self.optimizer, None, None)

        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9)

    def run(rate: float, batches: int, **options: Any) -> Fitted:
        amp = {"precision": "fp32"}
        return fit(
            lambda context: Unscheduled(context, rate), folder, amp, batches=batches, batch_size=1,
            **options,
        )  # fmt: skip

    saved = run(0.5, 4).checkpoint
    assert run(0.25, 6, first_batch=4, resume=saved).trial.seen == [(0.25, 0.9)] * 2
    assert run(0.5, 6, first_batch=4, resume=saved).trial.seen == [(0.5, 0.9)] * 2


def test_rate_that_the_trial_sets_by_hand_is_resumed(folder: Path) -> None:
    """Halved in the third batch; the YAML still says what it said."""

    class ByHand(Scheduled):
        def train_batch(
            self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
        ) -> dict[str, float]:
            if batch_idx == 2:
                for group in self.optimizers[0].param_groups:
                    group["lr"] /= 2
            return super().train_batch(batch, epoch_idx, batch_idx)

        def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
            super().__init__(context, OPTIMIZERS["SGD"], None, None)

    def run(batches: int, **options: Any) -> Fitted:
        return fit(ByHand, folder, {"precision": "fp32"}, batches=batches, batch_size=1, **options)

    saved = run(4).checkpoint
    assert content(folder, saved)["optimizers_state_dict"][0]["param_groups"][0]["lr"] == 0.01
    assert run(6, first_batch=4, resume=saved).trial.seen == [(0.01, 0.9)] * 2
