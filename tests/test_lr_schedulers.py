"""Every torch scheduler in Determined's loop: a resumed run steps with the undisturbed rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.optim import lr_scheduler

from tests.harness import Fitted, fit, loader
from tests.trials import Weights

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


class Scheduled(Weights):
    """One weight, or two with an optimizer each; notes what every batch steps with.

    Its second batch overflows in float16.

    Args:
        context: The trial's context.
        make_optimizer: For every model.
        make_scheduler: For every optimizer; None leaves their rates alone.
        mode: Of `context.wrap_lr_scheduler`; None has the library wrap it.
        models: How many.
    """

    def __init__(
        self,
        context: pytorch.PyTorchTrialContext,
        make_optimizer: Callable[[Any], torch.optim.Optimizer],
        make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        mode: Modes | None = None,
        models: int = 1,
    ) -> None:
        self.optimizer_of = make_optimizer  # type: ignore[method-assign,assignment]
        self.count, self.mode = models, mode
        super().__init__(context)
        self.seen: list[tuple[float, ...]] = []
        self.schedulers = [make_scheduler(o) for o in self.optimizers] if make_scheduler else []
        for scheduler in self.schedulers:
            if mode is None:
                self.amp.wrap_lr_scheduler(scheduler)
            else:
                context.wrap_lr_scheduler(scheduler, mode)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.seen.append(sum(map(settings, self.optimizers), ()))
        reported = super().train_batch(batch, epoch_idx, batch_idx)
        if self.mode is Modes.MANUAL_STEP:
            for scheduler in self.schedulers:
                if not isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    scheduler.step()
        return reported

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": 1.0}

    def build_training_data_loader(self) -> Any:
        second = math.inf if self.amp.settings.scales_the_loss else 1.0
        rows = [[1.0], [second], *[[1.0]] * (BATCHES - 2)]
        # Some schedules are by epochs: three of four batches, the second of each overflows.
        return loader(rows[:4] if self.mode is Modes.STEP_EVERY_EPOCH else rows)


FP16 = {"precision": "amp_fp16", "init_scale": 64.0}


def runs(
    *arguments: Any, trial: type[Scheduled] = Scheduled, amp: Any = FP16, **options: Any
) -> Callable[..., Fitted]:
    """Trains so many batches, from a run on if one is given."""

    def run(batches: int = BATCHES, resume: Fitted | None = None) -> Fitted:
        def make(context: pytorch.PyTorchTrialContext) -> Scheduled:
            return trial(context, *arguments)

        return fit(make, amp, batches=batches, resume=resume, batch_size=1, **options)

    return run


def resumes_as_undisturbed(run: Callable[..., Fitted], *stops: int) -> list[Any]:
    """What an undisturbed run stepped with, after the same of one that was resumed."""
    undisturbed: list[Any] = run().trial.seen
    for stop in stops:
        assert run(BATCHES, run(stop)).trial.seen == undisturbed[stop:]
    return undisturbed


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
    scheduler: str, mode: Modes | None, optimizer: str
) -> None:
    run = runs(OPTIMIZERS[optimizer], SCHEDULERS[scheduler], mode)
    undisturbed = resumes_as_undisturbed(run, 1, 2, 5)
    assert len(set(undisturbed)) > (1 if mode is Modes.STEP_EVERY_EPOCH else 2)


@pytest.mark.parametrize("amp", [FP16, {"precision": "amp_bf16"}, {"precision": "fp32"}])
@pytest.mark.parametrize("mode", [None, Modes.STEP_EVERY_BATCH])
def test_two_optimizers_resume_each_with_its_own_schedule(mode: Modes | None, amp: Any) -> None:
    made = iter([SCHEDULERS["StepLR"], SCHEDULERS["OneCycleLR"]] * 20)

    def alternate(optimizer: torch.optim.Optimizer) -> Any:
        return next(made)(optimizer)

    resumes_as_undisturbed(runs(OPTIMIZERS["SGD"], alternate, mode, 2, amp=amp), 2, 7)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first is skipped
@pytest.mark.parametrize("frequency", [1, 2])
def test_the_library_moves_it_with_applied_steps_and_the_context_with_all(
    frequency: int, caplog: pytest.LogCaptureFixture
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
    library, context = (
        runs(OPTIMIZERS["SGD"], SCHEDULERS["LambdaLR"], mode, aggregation_frequency=frequency)()
        for mode in (None, Modes.STEP_EVERY_OPTIMIZER_STEP)
    )

    def by_window(made: Fitted) -> list[float]:
        return [rate for rate, *_ in made.trial.seen[frequency - 1 :: frequency]]

    steps = BATCHES // frequency
    stands_still = [rates[max(0, step - (step > skipped))] for step in range(steps)]
    assert by_window(library) == stands_still
    assert by_window(context) == rates[:steps]
    assert "watch_lr_drift_steps" not in library.report
    assert context.report["watch_lr_drift_steps"] == 1
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


@pytest.mark.parametrize(("trial", "mode"), [(Scheduled, None), (OwnPlateau, Modes.MANUAL_STEP)])
def test_plateau_resumes_its_rate_and_its_patience(trial: Any, mode: Modes | None) -> None:
    """The loss never improves: after the second validation each halves the rate."""
    run = runs(OPTIMIZERS["SGD"], plateau, mode, trial=trial, amp=FP16, validation_period=2)
    rates = [rate for rate, _ in resumes_as_undisturbed(run, 4, 8)]
    assert rates == [0.02 * 0.5 ** max(0, batch // 2 - 1) for batch in range(BATCHES)]


FP32 = {"precision": "fp32"}


def test_settings_that_the_yaml_changed_win_over_the_checkpoint() -> None:
    """Without a scheduler: the new rate and decay, not those of the checkpoint."""

    def run(rate: float) -> Callable[..., Fitted]:
        return runs(lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9), amp=FP32)

    first = run(0.5)(4)
    assert run(0.25)(6, first).trial.seen == [(0.25, 0.9)] * 2
    assert run(0.5)(6, first).trial.seen == [(0.5, 0.9)] * 2


class HalvesByHand(Scheduled):
    """In the third batch; the YAML still says what it said."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.optimizer.param_groups[0]["lr"] /= 2
        return super().train_batch(batch, epoch_idx, batch_idx)


def test_rate_that_the_trial_sets_by_hand_is_resumed() -> None:
    run = runs(OPTIMIZERS["SGD"], trial=HalvesByHand, amp=FP32)
    first = run(4)
    assert first.checkpoint["optimizers_state_dict"][0]["param_groups"][0]["lr"] == 0.01
    assert run(6, first).trial.seen == [(0.01, 0.9)] * 2
