"""A run that no longer trains ends with the cause, and leaves its last good state."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import determined as det
import pytest
import torch
from torch import nn

from determined_amp import train
from determined_amp.amp.diagnosis import find_cause
from determined_amp.amp.guard import Guard, GuardError, RunningStatistics
from determined_amp.amp.mixed_precision import AmpSettings, MixedPrecision, OnOverflow
from determined_amp.amp.precision import Precision
from determined_amp.config.experiment import Searcher
from determined_amp.local.checkpoints import complete_checkpoints
from tests import training
from tests.test_monitor import Context
from trials.mlp import MLPTrial

FP16 = AmpSettings(Precision.AMP_FP16, min_scale=2.0, max_consecutive_skips=3, max_skip_ratio=0.5)
SOUND = {
    "loss": 1.0,
    "loss_scale_log2": 16.0,
    "consecutive_skips": 0,
    "applied_steps": 100,
    "skipped_steps": 0,
}
SINGLE = Searcher("validation_loss", smaller_is_better=True)


def guard(settings: AmpSettings = FP16, searcher: Searcher = SINGLE) -> Guard:
    context: Any = Context()
    context.distributed.allgather = lambda value: [value]
    amp = MixedPrecision(context, settings)
    return Guard(context, amp, nn.Linear(1, 1), lambda *batch: None, searcher)


class TestTrouble:
    def test_sound_report_passes(self) -> None:
        guard().on_training_workload_end(SOUND, {})

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"consecutive_skips": 4}, "4 optimizer steps in a row were skipped, more than"),
            (
                {"applied_steps": 49, "skipped_steps": 51, "consecutive_skips": 1},
                "51% of the optimizer steps",
            ),
            ({"consecutive_skips": 1, "loss_scale_log2": 1.0}, "at its floor 2"),
        ],
    )
    def test_is_an_error_that_says_what_was_seen(
        self, changed: dict[str, float], words: str
    ) -> None:
        with pytest.raises(GuardError, match=words) as ended:
            guard().on_training_workload_end({**SOUND, **changed}, {})
        assert ended.value.state_is_good

    @pytest.mark.parametrize(
        "changed",
        [
            {"consecutive_skips": 3},
            {"applied_steps": 50, "skipped_steps": 50},
            {"applied_steps": 0, "skipped_steps": 9},  # too few to judge
            {"applied_steps": 4, "skipped_steps": 6},  # the scale has found its level
            {"loss_scale_log2": 1.0},  # at the floor, but the step was applied
            {"loss": math.nan},  # of one batch whose step was skipped
        ],
    )
    def test_edge_is_not_trouble(self, changed: dict[str, float]) -> None:
        guard().on_training_workload_end({**SOUND, **changed}, {})

    def test_skips_after_the_scale_has_found_its_level_are_trouble(self) -> None:
        watched = guard()
        watched.on_training_workload_end({**SOUND, "applied_steps": 4, "skipped_steps": 6}, {})
        with pytest.raises(GuardError, match="60% of the optimizer steps"):
            watched.on_training_workload_end({**SOUND, "applied_steps": 8, "skipped_steps": 12}, {})

    @pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_BF16])
    def test_loss_that_is_not_finite_is_trouble_where_nothing_is_skipped(
        self, precision: Precision
    ) -> None:
        """Nothing was skipped, so the weights are not worth a checkpoint."""
        with pytest.raises(GuardError, match="the training loss is nan") as ended:
            guard(AmpSettings(precision)).on_training_workload_end({**SOUND, "loss": math.nan}, {})
        assert not ended.value.state_is_good

    def test_is_only_said_if_the_settings_want_that(self, caplog: pytest.LogCaptureFixture) -> None:
        settings = dataclasses.replace(FP16, on_overflow=OnOverflow.WARN)
        guard(settings).on_training_workload_end({**SOUND, "consecutive_skips": 9}, {})
        assert "9 optimizer steps in a row" in caplog.text

    def test_fails_a_searchs_trial_and_not_the_search(self) -> None:
        searcher = dataclasses.replace(SINGLE, name="random")
        with pytest.raises(det.InvalidHP, match="in a row"):
            guard(searcher=searcher).on_training_workload_end({**SOUND, "consecutive_skips": 9}, {})


class TestValidation:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_metric_that_is_not_finite_never_reaches_asha(self, value: float) -> None:
        """Determined 0.38.1's master ends the whole search on it."""
        searcher = dataclasses.replace(SINGLE, name="adaptive_asha")
        settings = dataclasses.replace(FP16, on_overflow=OnOverflow.WARN)
        with pytest.raises(det.InvalidHP, match="validation_loss is"):
            guard(settings, searcher).on_validation_end({"validation_loss": value})

    def test_finite_metric_passes(self) -> None:
        guard().on_validation_end({"validation_loss": 1.0})


class TestRunningStatistics:
    def test_poisoned_ones_go_back_to_the_last_report(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        statistics = RunningStatistics(model)
        statistics.remember()
        model(torch.tensor([[1.0, 3.0], [3.0, 5.0]]))  # running_mean: 0.1 * (2, 4)
        statistics.repair()
        first = model[0].get_buffer("running_mean")
        good = first.clone()
        torch.testing.assert_close(good, torch.tensor([0.2, 0.4]))
        model(torch.tensor([[1.0, math.inf], [3.0, 5.0]]))
        assert not torch.isfinite(first).all()
        statistics.repair()
        assert torch.equal(first, good)
        assert all(torch.isfinite(buffer).all() for buffer in model.buffers())
        assert "put back" in caplog.text

    def test_sound_ones_are_left_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.BatchNorm1d(2)
        statistics = RunningStatistics(model)
        statistics.remember()
        model(torch.ones(4, 2))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        statistics.repair()
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        assert not caplog.text


class Net(nn.Module):
    """Two layers by name, each multiplying by one number."""

    def __init__(self, body: float, head: float) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.body.weight.fill_(body)
            self.head.weight.fill_(head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head: torch.Tensor = self.head(self.body(x))
        return head


def cause(model: nn.Module, x: torch.Tensor, scale: float = 1.0) -> str | None:
    """The cause that is found for one fp16 batch with the loss mean(model(x))."""

    def backward() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().mean()
        (loss * scale).backward()

    return find_cause(model, (x,), backward)


class TestDiagnosis:
    def test_sound_batch_has_none(self) -> None:
        assert cause(Net(1, 1), torch.ones(4, 1)) is None

    def test_names_the_samples_of_targets_that_are_numbers(self) -> None:
        batch = (torch.ones(3, 2), torch.tensor([1.0, math.nan, 2.0]))
        found = find_cause(nn.Linear(2, 1), batch, lambda: None)
        assert found is not None
        assert "input 1 of the batch is not finite in samples [1]" in found

    def test_names_the_samples_that_are_not_finite(self) -> None:
        x = torch.ones(4, 1)
        x[2] = math.nan
        assert "not finite in samples [2]" in str(cause(Net(1, 1), x))

    def test_names_the_module_whose_forward_overflows(self) -> None:
        """2^10 * 2^10 = 2^20 = 1.05e6 is beyond 65504, in the head and not in the body."""
        sentence = str(cause(Net(2.0**10, 2.0**10), torch.ones(4, 1)))
        assert "forward overflow in module head: largest |activation| 1.05e+06" in sentence
        assert 'fp32_modules: ["^head$"]' in sentence

    def test_names_the_module_whose_gradient_overflows(self) -> None:
        """The gradient at the body's output is scale * 2^10 / 4 = 2^18; at the head's, 2^8."""
        sentence = str(cause(Net(2.0**-10, 2.0**10), torch.ones(4, 1), scale=2.0**10))
        assert "gradient overflow at module body" in sentence

    def test_names_a_parameter_that_is_lost_already(self) -> None:
        assert "parameter body.weight is not finite" in str(
            cause(Net(math.nan, 1), torch.ones(4, 1))
        )

    def test_changes_nothing(self) -> None:
        last = nn.Linear(1, 1)
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), last)
        last.weight.grad = torch.full((1, 1), 7.0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x, state = torch.ones(4, 1), torch.random.get_rng_state()
        cause(model, x)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
        assert last.weight.grad.item() == 7
        assert last.bias.grad is None


class TestRun:
    @pytest.fixture
    def poisoned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From the fifth batch on, the third sample of every batch has a NaN."""
        original = MLPTrial.train_batch

        def train_batch(trial: Any, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            images, labels = batch
            if batch_idx >= 4:
                images = images.clone()
                images[2, 0, 0, 0] = math.nan
            return original(trial, (images, labels), epoch_idx, batch_idx)

        monkeypatch.setattr(MLPTrial, "train_batch", train_batch)

    @pytest.mark.usefixtures("poisoned")
    def test_that_overflows_ends_with_cause_and_checkpoint(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Six of ten steps, the fewest to judge, are skipped; the weights are those of batch 4."""
        arguments = training.arguments("mlp/amp.yaml")
        assert train.main([*arguments, "--run-folder", str(tmp_path)]) == 2
        message = capfd.readouterr().err
        assert "no retry can help: 60% of the optimizer steps" in message
        assert "not finite in samples [2]" in message
        newest = complete_checkpoints(tmp_path / "checkpoints")[-1]
        assert newest.name == "batch-00000010"
        weights = training.checkpoint(tmp_path, 10)["models_state_dict"][0]
        assert all(torch.isfinite(value).all() for value in weights.values())

    @pytest.mark.usefixtures("poisoned")
    def test_in_fp32_ends_without_a_checkpoint_of_lost_weights(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        arguments = training.arguments("mlp/fp32.yaml")
        assert train.main([*arguments, "--run-folder", str(tmp_path)]) == 2
        assert "the training loss is nan in fp32" in capfd.readouterr().err
        newest = complete_checkpoints(tmp_path / "checkpoints")[-1]
        assert newest.name == "batch-00000004"


def test_scale_stops_at_its_floor() -> None:
    """GradScaler alone reaches exactly 0 after 200 bad steps; the next good one then writes NaN."""
    context: Any = Context()
    amp = MixedPrecision(context, dataclasses.replace(FP16, init_scale=16.0))
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)

    def step(gradient: float) -> None:
        parameter.grad = torch.full((1,), gradient) * amp.loss_scale()
        amp.scaler.step(optimizer)
        amp.scaler.update()
        amp.count_step()

    for _ in range(200):
        step(math.inf)
    assert float(amp.loss_scale()) == 2.0
    assert int(amp.consecutive_skips()) == 200
    step(0.25)
    assert parameter.item() == 0.75
    assert int(amp.consecutive_skips()) == 0
    assert int(amp.applied_steps) == 1
