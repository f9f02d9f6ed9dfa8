"""Two models, two optimizers, one scaler: the shape of a GAN, with numbers derived by hand.

Each model is y = w x with its own input, so its gradient is the mean of that input whatever w is,
and SGD with rate 0.5 moves w by -0.5 * mean(x). A row is a batch of one sample (x_d, x_g).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from determined import pytorch
from torch import nn
from torch.utils.data import TensorDataset

from determined_amp import GuardError, MixedPrecision
from tests.loops import Fitted, content, fit
from tests.test_amp import FUSED_ON_CPU
from tests.two_weights import TwoWeights

INF = math.inf
NEEDS_FUSED = pytest.mark.skipif(not FUSED_ON_CPU, reason="this torch has no fused one on the CPU")
AMP = {"precision": "amp_fp16", "init_scale": 4.0, "growth_interval": 1000}
HIGH = {**AMP, "init_scale": 2.0**10}  # far from its floor


def run(
    folder: Path, rows: list[tuple[float, float]], amp: dict[str, Any] | None = None, **options: Any
) -> Fitted:
    trial_class = options.pop("trial_class", TwoWeights)
    options.setdefault("batches", len(rows))
    return fit(
        lambda context: trial_class(context, rows), folder, amp or AMP, batch_size=1, **options
    )


class UpdatesAfterEachStep(TwoWeights):
    """Steps its discriminator three times a batch, as a Wasserstein GAN does.

    Attributes:
        counted: Samples counted after each batch, since the last report.
    """

    def __init__(self, context: Any, rows: Any) -> None:
        super().__init__(context, rows)
        self.counted: list[int] = []

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, float]:
        for which in (0, 0, 0, 1):
            with self.amp.autocast():
                loss = self.models[which](batch[which]).float().mean()
            self.context.backward(self.amp.scaler.scale(loss))
            self.step(self.optimizers[which])
            reported = self.amp.update(loss)
        self.counted.append(self.amp.metrics._samples)
        return reported


@pytest.mark.parametrize("precision", ["amp_fp16", "amp_bf16", "fp32"])
def test_update_after_each_of_several_steps_counts_the_batch_once(
    folder: Path, precision: str
) -> None:
    """Losses 1, 0.5, 0 and 1: w_d falls by 0.5 a step. The second batch overflows nowhere."""
    amp = AMP if precision == "amp_fp16" else {"precision": precision}
    made = run(folder, [(1.0, 1.0)] * 2, amp, trial_class=UpdatesAfterEachStep, reporting_period=2)
    assert made.trial.weights() == [1.0 - 6 * 0.5, 1.0 - 2 * 0.5]
    assert made.trial.counted == [1, 2]
    (report,) = made.reports.training
    assert report["loss"] == (1.0 + 0.5 + 0.0 + 1.0 - 0.5 - 1.0 - 1.5 + 0.5) / 8
    assert (report["watch_applied_steps_0"], report["watch_applied_steps_1"]) == (6, 2)


class TestOneOverflows:
    def test_skips_its_own_step_alone_and_is_counted_alone(self, folder: Path) -> None:
        """The discriminator overflows in the second of three batches; the generator steps."""
        made = run(folder, [(1.0, 1.0), (INF, 1.0), (1.0, 1.0)])
        assert made.trial.weights() == [1.0 - 2 * 0.5, 1.0 - 3 * 0.5]
        report = made.reports.training[-1]
        assert (report["watch_applied_steps_0"], report["skipped_steps_0"]) == (2, 1)
        assert (report["watch_applied_steps_1"], report["skipped_steps_1"]) == (3, 0)
        assert report["loss_scale_log2"] == 1  # 4, halved once for both: there is one scale
        assert "watch_applied_steps" not in report

    @pytest.mark.parametrize("fused", [False, True])
    def test_second_one_leaves_the_first_its_counts_and_its_rate(
        self, folder: Path, *, fused: bool
    ) -> None:
        """The `update` of torch adds what all optimizers found into the tensor of the first."""
        if fused and not FUSED_ON_CPU:
            pytest.skip("this torch has no fused optimizer on the CPU")

        class Scheduled(TwoWeights):
            def __init__(self, context: Any, rows: Any) -> None:
                super().__init__(context, rows)
                for optimizer in self.optimizers:
                    halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
                    self.amp.wrap_lr_scheduler(halving)

        Scheduled.fused = fused
        made = run(folder, [(1.0, 1.0), (1.0, INF), (1.0, 1.0)], trial_class=Scheduled)
        report = made.reports.training[-1]
        assert (report["watch_applied_steps_0"], report["skipped_steps_0"]) == (3, 0)
        assert (report["watch_applied_steps_1"], report["skipped_steps_1"]) == (2, 1)
        rates = [float(it.param_groups[0]["lr"]) for it in made.trial.optimizers]
        assert rates == [0.5**4, 0.5**3]

    def test_norms_are_those_of_each(self, folder: Path) -> None:
        report = run(folder, [(1.0, 3.0)]).reports.training[-1]
        assert (report["watch_grad_norm_0"], report["watch_grad_norm_1"]) == (1.0, 3.0)
        headroom = [report[f"watch_headroom_bits_{index}"] for index in (0, 1)]
        assert headroom[0] - headroom[1] == pytest.approx(math.log2(3), abs=1e-6)

    def test_accumulation_skips_by_the_window(self, folder: Path) -> None:
        rows = [(1.0, 1.0), (INF, 1.0), (1.0, 1.0), (1.0, 3.0)]
        made = run(folder, rows, aggregation_frequency=2)
        assert made.trial.weights() == [1.0 - 0.5 * 1, 1.0 - 0.5 * 1 - 0.5 * 2]

    def test_counts_are_resumed(self, folder: Path) -> None:
        rows = [(1.0, 1.0), (INF, 1.0), (1.0, 1.0), (1.0, 1.0)]
        undisturbed = run(folder, rows).reports.training[-1]
        saved = run(folder, rows, batches=2).checkpoint
        resumed = run(folder, rows, first_batch=2, resume=saved).reports.training[-1]
        counts = ("watch_applied_steps", "skipped_steps", "watch_consecutive_skips")
        names = [name for name in undisturbed if name.startswith(counts)]
        assert len(names) == 5  # the second has skipped nothing
        assert {name: resumed[name] for name in names} == {
            name: undisturbed[name] for name in names
        }
        state = content(folder, saved)["callbacks"]["determined_amp.mixed_precision"]["optimizers"]
        assert [(s["attempted"], s["applied"]) for s in state] == [(2, 1), (2, 2)]

    def test_one_that_steps_more_often_has_counts_of_its_own(self, folder: Path) -> None:
        """The generator is stepped in every second batch only."""

        class Seldom(TwoWeights):
            def steps_generator(self, batch_idx: int) -> bool:
                return batch_idx % 2 == 1

        report = run(folder, [(1.0, 1.0)] * 4, trial_class=Seldom).reports.training[-1]
        assert (report["watch_applied_steps_0"], report["watch_applied_steps_1"]) == (4, 2)


class TestGuard:
    def test_names_the_optimizer_and_the_model(self, folder: Path) -> None:
        rows = [(1.0, 1.0), *[(INF, 1.0)] * 5]
        with pytest.raises(GuardError, match=r"optimizer 0: 3 optimizer steps in a row") as raised:
            run(folder, rows, {**HIGH, "max_consecutive_skips": 2})
        assert "input 0 of the batch is not finite" in str(raised.value)

    def test_leaves_a_checkpoint_of_the_last_good_state(self, folder: Path) -> None:
        rows = [(1.0, 1.0), *[(INF, 1.0)] * 5]
        with pytest.raises(GuardError):
            run(folder, rows, {**HIGH, "max_consecutive_skips": 2})
        (saved,) = folder.iterdir()
        weights = content(folder, saved.name)["models_state_dict"]
        assert [float(w["weight"]) for w in weights] == [0.5, 1.0 - 4 * 0.5]

    @pytest.mark.parametrize("steps_by", ["context", "scaler", "optimizer"])
    def test_diagnosis_leaves_no_gradient_and_takes_no_step(
        self, folder: Path, steps_by: str
    ) -> None:
        """With `warn` the training goes on after it, from exactly the state before it."""

        class Stepping(TwoWeights):
            how = steps_by

        settings = {**HIGH, "max_consecutive_skips": 1}
        rows = [(1.0, 1.0), (INF, 1.0), (INF, 1.0), (1.0, 1.0)]
        warned = run(folder, rows, {**settings, "on_overflow": "warn"}, trial_class=Stepping)
        silent = run(folder, rows, HIGH, trial_class=Stepping)
        assert warned.trial.diagnosed > 0 == silent.trial.diagnosed
        assert warned.trial.weights() == silent.trial.weights() == [0.0, -1.0]
        assert warned.trial.norms == silent.trial.norms


class Unused(pytorch.PyTorchTrial):
    """An optimizer that is never stepped."""

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.context = context
        self.amp = MixedPrecision(context)
        self.models = [context.wrap_model(nn.Linear(1, 1)) for _ in range(2)]
        self.optimizers = [
            context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
            for model in self.models
        ]

    def train_batch(
        self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
    ) -> dict[str, float]:
        (x,) = batch
        with self.amp.autocast():
            loss = self.models[0](x).float().mean()
        self.context.backward(self.amp.scaler.scale(loss))
        self.context.step_optimizer(self.optimizers[0], scaler=self.amp.scaler)
        return self.amp.update(loss)

    def evaluate_batch(self, batch: pytorch.TorchData, batch_idx: int) -> dict[str, float]:
        return {"validation_loss": 0.0}

    def build_training_data_loader(self) -> pytorch.DataLoader:
        return pytorch.DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=1)

    build_validation_data_loader = build_training_data_loader

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return self.amp.callbacks(self)


def test_optimizer_that_is_never_stepped_is_no_trouble(folder: Path) -> None:
    report = fit(Unused, folder, AMP, batches=4, batch_size=1).reports.training[-1]
    assert (report["watch_applied_steps_0"], report["watch_applied_steps_1"]) == (4, 0)
    assert "watch_grad_norm_0" not in report  # nobody clips, so nothing was measured


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [None, pytest.param(True, marks=NEEDS_FUSED)])
def test_step_without_any_gradient_changes_nothing(
    folder: Path, fused: bool | None, clips: bool
) -> None:
    """As in float32; heads of several tasks have such steps."""

    class BothAreStepped(Unused):
        def train_batch(
            self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
        ) -> dict[str, float]:
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["fused"] = fused
                setattr(optimizer, "_step_supports_amp_scaling", bool(fused))  # noqa: B010
            clip = self.amp.clip(self.optimizers[1], 1.0) if clips else None
            self.context.step_optimizer(self.optimizers[1], clip, scaler=self.amp.scaler)
            return super().train_batch(batch, epoch_idx, batch_idx)

    made = fit(BothAreStepped, folder, AMP, batches=4, batch_size=1)
    report = made.reports.training[-1]
    assert (report["watch_applied_steps_0"], report["watch_applied_steps_1"]) == (4, 4)
    torch.manual_seed(0)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not torch.equal(made.trial.models[0].bias, first.bias)
    assert torch.equal(made.trial.models[1].weight, second.weight)


def test_one_is_stepped_several_times_in_a_batch(folder: Path) -> None:
    class Thrice(Unused):
        def train_batch(
            self, batch: pytorch.TorchData, epoch_idx: int, batch_idx: int
        ) -> dict[str, float]:
            for _ in range(2):
                (x,) = batch
                with self.amp.autocast():
                    loss = self.models[1](x).float().mean()
                self.context.backward(self.amp.scaler.scale(loss))
                self.context.step_optimizer(self.optimizers[1], scaler=self.amp.scaler)
                self.amp.finish_steps()
            return super().train_batch(batch, epoch_idx, batch_idx)

    made = fit(Thrice, folder, AMP, batches=4, batch_size=1)
    report = made.reports.training[-1]
    assert (report["watch_applied_steps_0"], report["watch_applied_steps_1"]) == (4, 8)
    torch.manual_seed(0)
    _, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert made.trial.models[1].bias.item() == pytest.approx(second.bias.item() - 8 * 0.5)
