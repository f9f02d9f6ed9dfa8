"""`MixedPrecision` in trials of a stranger's shape: what it refuses, reports and leaves alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from determined_amp import AmpSettings, ConfigError, MixedPrecision, Precision
from determined_amp.amp.metrics import WARMUP_BATCHES
from determined_amp.amp.patched import patched
from determined_amp.amp.replay import undisturbed
from determined_amp.experiment.errors import ending_the_program
from determined_amp.trial.determined_0_38 import SafeController, use_safe_loop
from tests import loops, training
from tests.test_metrics import Context

FP16: Mapping[str, Any] = {"precision": "amp_fp16", "init_scale": 4.0}
FP32: Mapping[str, Any] = {"precision": "fp32"}


class StrangersTrial(pytorch.PyTorchTrial):
    """y = w x from w = 1, loss mean(y), SGD at rate 1/4 with momentum, in the fewest lines."""

    rows: Sequence[Sequence[float]] = ((1.0, 1.0), (3.0, 3.0))
    wrapping: Mapping[str, Any] = {}

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.amp = MixedPrecision(context)
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        self.model = context.wrap_model(self.amp.prepare(model))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.25, momentum=0.5)
        self.optimizer = context.wrap_optimizer(optimizer, **self.wrapping)

    def backward(self, batch: Any) -> torch.Tensor:
        with self.amp.autocast():
            loss: torch.Tensor = self.model(batch[0]).float().mean()
        self.context.backward(self.amp.scaler.scale(loss))
        return loss

    def step(self) -> None:
        clip = self.amp.clip(self.optimizer)
        self.context.step_optimizer(self.optimizer, clip_grads=clip, scaler=self.amp.scaler)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.backward(batch)
        self.step()
        return self.amp.update(loss, samples=len(batch[0]))

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> Any:
        return loops.loader(self.rows)

    def build_validation_data_loader(self) -> Any:
        return loops.loader([[1.0]])

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)


def report_of(
    trial_class: type[StrangersTrial], folder: Path, amp: Mapping[str, Any] = FP16, **options: Any
) -> dict[str, Any]:
    """The one report of a run over all rows."""
    batches = len(trial_class.rows)
    fitted = loops.fit(
        trial_class, folder, amp, batches=batches, reporting_period=batches, **options
    )
    (report,) = fitted.reports.training
    return report


def refused(
    trial_class: type[StrangersTrial],
    folder: Path,
    amp: Mapping[str, Any] | None = FP16,
    **options: Any,
) -> str:
    """What the run of a trial is refused with."""
    with pytest.raises(ConfigError) as error:
        loops.fit(trial_class, folder, amp, batches=2, **options)
    return str(error.value)


class MadeAfterWrapModel(StrangersTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.wrap_model(nn.Linear(1, 1))
        super().__init__(context)


class MadeTwice(StrangersTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        MixedPrecision(context)
        super().__init__(context)


class UsesAmpOfDetermined(StrangersTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.experimental.use_amp()
        super().__init__(context)


class UsesAmpOfDeterminedLater(StrangersTrial):
    def build_training_data_loader(self) -> Any:
        context: Any = self.context
        context._scaler = torch.amp.GradScaler("cpu")
        return super().build_training_data_loader()


class ForgetsTheCallbacks(StrangersTrial):
    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {}


class ForgetsTheUpdate(StrangersTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.backward(batch)
        self.step()
        return {"loss": loss}


class ForgetsTheScaler(StrangersTrial):
    def step(self) -> None:
        self.context.step_optimizer(self.optimizer)


class ForgetsToScale(StrangersTrial):
    def backward(self, batch: Any) -> torch.Tensor:
        with self.amp.autocast():
            loss: torch.Tensor = self.model(batch[0]).float().mean()
        self.context.backward(loss)
        return loss


class ClipsBeforeUnscaling(StrangersTrial):
    def step(self) -> None:
        def clip(parameters: Any) -> None:
            nn.utils.clip_grad_norm_(parameters, 1.0)

        self.context.step_optimizer(self.optimizer, clip_grads=clip, scaler=self.amp.scaler)


class StepsTheSchedule(StrangersTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        scheduler = self.amp.wrap_lr_scheduler(lr_scheduler.StepLR(self.optimizer, 1))
        scheduler.step()


class HasBothSchedules(StrangersTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.amp.wrap_lr_scheduler(lr_scheduler.ReduceLROnPlateau(self.optimizer))
        self.amp.wrap_lr_scheduler(lr_scheduler.StepLR(self.optimizer, 1))


class HasSchedulesOfBothKinds(StrangersTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        self.amp.wrap_lr_scheduler(lr_scheduler.StepLR(self.optimizer, 1))
        scheduler: Any = lr_scheduler.StepLR(self.optimizer, 1)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_EPOCH)


class StepsOneOptimizerTwice(StrangersTrial):
    def step(self) -> None:
        super().step()
        self.backward([torch.ones(2, 1)])
        super().step()


class SumsTheGradients(StrangersTrial):
    wrapping: Mapping[str, Any] = {"average_aggregated_gradients": False}


class SchedulesAnUnwrappedOptimizer(StrangersTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        other = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.amp.wrap_lr_scheduler(lr_scheduler.StepLR(other, 1))


class SchedulesTwice(StrangersTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        for _ in range(2):
            self.amp.wrap_lr_scheduler(lr_scheduler.StepLR(self.optimizer, 1))


def test_trial_without_a_mistake_is_trained(folder: Path) -> None:
    """The control of all that is refused below: w = 1 - 1/4, then - (3 + 1/2) / 4."""
    trial = loops.fit(StrangersTrial, folder, FP16, batches=2).trial
    assert trial.model.weight.item() == -0.125
    assert MixedPrecision.of(trial.context) is trial.amp


@pytest.mark.parametrize(
    ("trial_class", "words"),
    [
        (MadeAfterWrapModel, "MixedPrecision: make it before context.wrap_model"),
        (MadeTwice, "MixedPrecision: this context has one already"),
        (ForgetsTheCallbacks, "build_callbacks of the trial must return amp.callbacks(self)"),
        (ForgetsTheUpdate, "it steps an optimizer, and must end with amp.update(...)"),
        (ClipsBeforeUnscaling, "its clip_grads clips gradients that may still be scaled"),
        (StepsTheSchedule, "leave StepLR.step() to MixedPrecision"),
        (HasBothSchedules, "its optimizer has a schedule already"),
        (HasSchedulesOfBothKinds, "allowed: one of them"),
        (StepsOneOptimizerTwice, "steps an optimizer twice"),
        (ForgetsTheScaler, "allowed: context.step_optimizer(optimizer, scaler=amp.scaler)"),
        (ForgetsToScale, "allowed: context.backward(amp.scaler.scale(loss))"),
        (SchedulesAnUnwrappedOptimizer, "is not one that context.wrap_optimizer returned"),
        (SchedulesTwice, "its optimizer has a schedule already"),
        (UsesAmpOfDeterminedLater, "leave out experimental.use_amp() and wrap_scaler()"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("amp", [FP16, FP32], ids=["fp16", "fp32"])
def test_mistake_in_the_trial_is_said(
    trial_class: type[StrangersTrial], words: str, amp: Mapping[str, Any], folder: Path
) -> None:
    """In every precision, so that none comes to light only when it is switched."""
    assert words in refused(trial_class, folder, amp)


@pytest.mark.filterwarnings("ignore:.*GradScaler:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA:UserWarning")
def test_determineds_own_amp_beside_it_is_refused(folder: Path) -> None:
    assert "leave out experimental.use_amp()" in refused(UsesAmpOfDetermined, folder)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_norm_that_clips_everything_away_is_refused(max_norm: float) -> None:
    context: Any = Context()
    amp = MixedPrecision(context, AmpSettings(Precision.FP32))
    optimizer = context.wrap_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    with pytest.raises(ConfigError, match=f"got max_norm {max_norm}; allowed: a number above 0"):
        amp.clip(optimizer, max_norm)
    amp.clip(optimizer, 1.0e-30)


class TestSection:
    def test_that_is_missing_is_said(self, folder: Path) -> None:
        assert "amp: missing; allowed: amp: {precision: amp_fp16}" in refused(
            StrangersTrial, folder, None
        )

    def test_that_is_wrong_is_said_with_every_mistake(self, folder: Path) -> None:
        wrong = {"precision": "fp16", "init_scale": -1, "growth_intervall": 5}
        said = refused(StrangersTrial, folder, wrong)
        assert "3 problems" in said
        for key in ("precision", "init_scale", "growth_intervall"):
            assert f"hyperparameters.amp.{key}: " in said

    def test_of_a_context_without_hyperparameters_can_be_given(self) -> None:
        context: Any = Context()
        context._hparams = None
        with pytest.raises(ConfigError, match="the context has no hyperparameters"):
            MixedPrecision(context)
        settings = AmpSettings(Precision.AMP_BF16)
        assert MixedPrecision(context, settings).settings is settings


class TestAggregation:
    """Rows 1 and 3: the mean gradient is 2, so w = 1 - 2 / 4."""

    def test_takes_the_mean(self, folder: Path) -> None:
        fitted = loops.fit(StrangersTrial, folder, FP16, batches=2, aggregation_frequency=2)
        assert fitted.trial.model.weight.item() == 0.5

    def test_that_sums_is_refused(self, folder: Path) -> None:
        said = refused(SumsTheGradients, folder, aggregation_frequency=2)
        assert "average_aggregated_gradients: got false, which sums the gradients of the 2" in said

    def test_of_one_batch_has_no_sum(self, folder: Path) -> None:
        assert loops.fit(SumsTheGradients, folder, FP16, batches=2).trial.model.weight == -0.125


class TestBackends:
    @pytest.fixture(autouse=True)
    def _switches_restored(self) -> Iterator[None]:
        matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        yield
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn

    @pytest.mark.parametrize("set_backends", [False, True])
    def test_are_set_only_if_that_is_asked_for(self, set_backends: bool) -> None:
        context: Any = Context()
        MixedPrecision(context, AmpSettings(Precision.FP32, set_backends=set_backends))
        assert torch.get_float32_matmul_precision() == ("highest" if set_backends else "high")
        assert torch.backends.cudnn.allow_tf32 is not set_backends


class ReportsItsOwnLoss(StrangersTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {**super().train_batch(batch, epoch_idx, batch_idx), "loss": 7.0}


class ReturnsTheLoss(StrangersTrial):
    """A tensor: Determined reports it as `loss`, the mean over batches."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        super().train_batch(batch, epoch_idx, batch_idx)
        return torch.tensor(7.0)


class UpdatesWithoutALoss(StrangersTrial):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.backward(batch)
        self.step()
        return self.amp.update()


class CountsItsOwnSamples(StrangersTrial):
    """A batch of x counts x samples."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.backward(batch)
        return self.amp.update(batch[0].mean())

    def get_batch_length(self, batch: Any) -> int:
        return int(batch[0][0])


class TestReportedLoss:
    def test_is_the_mean_over_samples(self, folder: Path) -> None:
        """Loss w x: 1 * 1 and 3/4 * 3."""
        assert report_of(StrangersTrial, folder)["loss"] == (1 + 2.25) / 2

    @pytest.mark.parametrize("trial_class", [ReportsItsOwnLoss, ReturnsTheLoss])
    def test_is_the_trials_where_it_reports_one(
        self, trial_class: type[StrangersTrial], folder: Path
    ) -> None:
        assert report_of(trial_class, folder)["loss"] == 7

    def test_is_left_out_where_none_is_given(self, folder: Path) -> None:
        report = report_of(UpdatesWithoutALoss, folder)
        assert "loss" not in report
        assert report["watch_applied_steps"] == 2

    def test_weighs_batches_by_the_trials_own_length(self, folder: Path) -> None:
        """(1 * 1 + 3 * 3) / (1 + 3)."""
        assert report_of(CountsItsOwnSamples, folder)["loss"] == 2.5


class LongTrial(StrangersTrial):
    rows = ((1.0, 1.0),) * (WARMUP_BATCHES + 4)


class LongTrialOfAPlainLoader(LongTrial):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        context.experimental.disable_dataset_reproducibility_checks()

    def build_training_data_loader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(2 * len(self.rows), 1)), batch_size=2)


class TestWaitForData:
    def test_is_reported_with_determineds_loader(self, folder: Path) -> None:
        report = report_of(LongTrial, folder, FP32)
        assert 0 < report["watch_data_wait_share"] < 1
        assert report["samples_per_second"] > 0

    def test_is_not_with_any_other(self, folder: Path) -> None:
        report = report_of(LongTrialOfAPlainLoader, folder, FP32)
        assert "watch_data_wait_share" not in report
        assert report["samples_per_second"] > 0


class NestsAutocast(StrangersTrial):
    """Its loss function has an autocast of its own."""

    def backward(self, batch: Any) -> torch.Tensor:
        with self.amp.autocast():
            return self.noted(super().backward, batch)

    def noted(self, backward: Any, batch: Any) -> torch.Tensor:
        self.dtypes = [self.product()]
        with pytest.raises(ZeroDivisionError), self.amp.autocast():
            raise ZeroDivisionError
        with torch.autocast("cpu", enabled=False):
            with self.amp.autocast():
                self.dtypes.append(self.product())
            self.dtypes.append(self.product())
        loss: torch.Tensor = backward(batch)
        self.dtypes.append(self.product())
        return loss

    def product(self) -> torch.dtype:
        return (torch.ones(1, 1) @ torch.ones(1, 1)).dtype

    def evaluate_batch(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.dtypes.append(self.product())
        return super().evaluate_batch(batch, batch_idx)


@pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
def test_autocast_within_itself_restores_what_was(folder: Path, precision: str) -> None:
    trial = loops.fit(NestsAutocast, folder, {"precision": precision}, batches=2).trial
    low = trial.amp.settings.precision.autocast_dtype or torch.float32
    assert trial.dtypes == [low, low, torch.float32, low, torch.float32]


class TrainsAgainWithoutSteps(StrangersTrial):
    """Looks at its state around a batch that is trained again.

    Attributes:
        before: State before each.
        after: State after each.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        super().__init__(context)
        scheduler: Any = lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)
        by_hand = pytorch.LRScheduler.StepMode.MANUAL_STEP
        self.scheduler: Any = context.wrap_lr_scheduler(scheduler, by_hand)
        self.before: list[Any] = []
        self.after: list[Any] = []

    def state(self) -> Any:
        gradients = self.amp.metrics.of(self.optimizer)
        (weight,) = self.model.parameters()
        return (
            weight.item(),
            None if weight.grad is None else weight.grad.item(),
            self.optimizer.state_dict()["state"][0]["momentum_buffer"].tolist(),
            self.optimizer.param_groups[0]["lr"],
            self.scheduler.last_epoch,
            self.amp.scaler.state_dict(),
            gradients.counts.state_dict(),
            float(gradients.norm_sum.total()),
            dict(self.amp.scaler.outcomes),
        )

    def everything(self, batch: Any) -> None:
        self.backward(batch)
        self.step()
        self.amp.clip(self.optimizer)(self.model.parameters())
        self.amp.scaler.step(self.optimizer)
        self.amp.scaler.update()
        assert self.amp.update(torch.ones(()), samples=1) == {}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.backward(batch)
        clip = self.amp.clip(self.optimizer)
        self.context.step_optimizer(
            self.optimizer, clip_grads=clip, scaler=self.amp.scaler, auto_zero_grads=False
        )
        reported = self.amp.update(loss, samples=len(batch[0]))
        self.before.append(self.state())
        with undisturbed(self.model), self.amp.without_steps():
            self.everything(batch)
        self.after.append(self.state())
        self.optimizer.zero_grad()
        return reported


class TestWithoutSteps:
    def test_nothing_moves_whoever_asks_for_it(self, folder: Path) -> None:
        trial = loops.fit(TrainsAgainWithoutSteps, folder, FP16, batches=2).trial
        assert trial.after == trial.before

    def test_everything_works_again_afterwards(self, folder: Path) -> None:
        """As `test_trial_without_a_mistake_is_trained`, with the same report."""
        report = report_of(TrainsAgainWithoutSteps, folder)
        plain = report_of(StrangersTrial, folder)
        same = (
            "loss",
            "watch_grad_norm",
            "watch_applied_steps",
            "skipped_steps",
            "loss_scale_log2",
        )
        for name in same:
            assert report[name] == plain[name]
        trial = loops.fit(TrainsAgainWithoutSteps, folder, FP16, batches=2).trial
        assert trial.model.weight.item() == -0.125
        before = trial.state()
        trial.model.weight.grad = torch.ones(1, 1)
        trial.optimizer.step()
        trial.scheduler.step()
        assert trial.state()[0] != before[0]
        assert (trial.state()[3], trial.state()[4]) == (before[3] / 2, before[4] + 1)
        trial.optimizer.zero_grad()
        assert trial.model.weight.grad is None

    def test_error_in_between_ends_it(self) -> None:
        context: Any = Context()
        amp = MixedPrecision(context, AmpSettings(Precision.FP32))
        weight = nn.Parameter(torch.ones(1))
        optimizer = context.wrap_optimizer(torch.optim.SGD([weight], lr=1.0))
        context.step_optimizer = print
        weight.grad = torch.ones(1)

        def step_and_fail() -> None:
            with amp.without_steps():
                optimizer.step()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            step_and_fail()
        assert weight.item() == 1
        optimizer.step()
        assert weight.item() == 0
        assert context.step_optimizer is print


class TestPatched:
    def test_class_attribute_comes_back_as_it_was(self) -> None:
        class Owner:
            @staticmethod
            def own() -> str:
                return "own"

        class Heir(Owner):
            pass

        for owner in (Owner, Heir):
            had = dict(vars(owner))
            with patched(owner, "own", lambda: "replaced"):
                assert owner.own() == "replaced"
            assert (owner.own(), owner().own()) == ("own", "own")
            assert dict(vars(owner)) == had

    def test_instance_is_left_without_an_attribute_of_its_own(self) -> None:
        model = nn.Linear(1, 1)
        with patched(model, "forward", abs):
            assert vars(model)["forward"] is abs
        assert "forward" not in vars(model)


# A plain script: a trial of a stranger's, whose first batch overflows, and `Trainer`.
SCRIPT = """
import os, sys
from pathlib import Path
from determined import core, pytorch
from determined.common import storage
from tests.test_mixed_precision import FP16, MadeTwice, StrangersTrial

hook, loop = sys.excepthook, pytorch._PyTorchTrialController
folder, trial_class = Path(sys.argv[1]), {"fails": StrangersTrial, "twice": MadeTwice}[sys.argv[2]]
StrangersTrial.rows = ((1.0,), (float("inf"),))
os.chdir(folder.parent / "work")  # which the loop copies into every checkpoint
amp = dict(FP16, max_consecutive_skips=1, audit=False)
try:
    with pytorch.init(hparams={"amp": amp}, exp_conf={}) as context:
        context._core.checkpoint = core.DummyCheckpointContext(
            context.distributed, storage.SharedFSStorageManager(str(folder))
        )
        trial = trial_class(context)
        assert sys.excepthook is hook and pytorch._PyTorchTrialController is loop
        pytorch.Trainer(trial, context).fit(
            max_length=pytorch.Batch(8), reporting_period=pytorch.Batch(1), checkpoint_policy="none"
        )
finally:
    assert pytorch._PyTorchTrialController is loop
"""


class TestPlainScript:
    @pytest.mark.parametrize(
        ("trial", "says"),
        [("fails", "Cause: input 0 of the batch"), ("twice", "this context has one already")],
    )
    def test_ends_with_one_line_and_its_status(self, trial: str, says: str, folder: Path) -> None:
        process = training.start("-c", SCRIPT, str(folder), trial)
        output, _ = process.communicate(timeout=120)
        last = output.splitlines()[-1]
        assert process.returncode == 2, output
        assert last.startswith("no retry can help: ")
        assert says in last
        assert len(list(folder.glob("*/state_dict.pth"))) == (trial == "fails")

    def test_error_of_any_other_kind_is_left_to_the_hook_before(
        self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        seen: list[Any] = []
        monkeypatch.setattr(sys, "excepthook", lambda *caught: seen.append(caught))
        context: Any = Context()
        with pytest.raises(ValueError, match="of torch"), ending_the_program():
            raise ValueError("of torch")
        MixedPrecision(context, AmpSettings(Precision.FP32))
        assert not sys.excepthook.__module__.startswith("determined_amp")
        with pytest.raises(ConfigError, match="has one already"):
            MixedPrecision(context, AmpSettings(Precision.FP32))
        assert sys.excepthook.__module__.startswith("determined_amp")
        error = ValueError("of torch")
        sys.excepthook(ValueError, error, None)
        assert seen == [(ValueError, error, None)]
        assert capfd.readouterr().err == ""


class TestLoop:
    def made(self, kind: type[pytorch._PyTorchTrialController]) -> type:
        """What becomes of a loop that asks a trial for callbacks."""
        loop: Any = object.__new__(kind)

        def asks(self: Any) -> None:
            use_safe_loop()

        asks(loop)
        return type(loop)

    def test_of_determined_becomes_safe_and_no_other_one_does(self) -> None:
        class Theirs(pytorch._PyTorchTrialController):
            pass

        assert self.made(pytorch._PyTorchTrialController) is SafeController
        assert self.made(Theirs) is Theirs
        assert self.made(SafeController) is SafeController
        use_safe_loop()  # without one nothing happens
