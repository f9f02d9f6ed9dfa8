"""`finder.frozen`: a batch can be passed through a trial any number of times; nothing moves."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import determined as det
import numpy as np
import pytest
import torch
from determined import pytorch
from torch import nn

from benchmarks.small_trials import BatchNormCNN, PreNormTransformer, SmallTrial, SummedLoss
from determined_amp import AmpSettings, MixedPrecision, Precision
from determined_amp.amp.patched import patched
from determined_amp.amp.replay import float16_as
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder.frozen import FrozenBatch, Gradients, LossScaleError
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.frozen import in_training, wrapped_scaler
from tests import harness
from tests.harness import context_of
from tests.loss_scale import Context, config, looked_at, train
from tests.training import ROOT, SMALL, digest
from trials.mlp import MLPTrial

Batches = Sequence[FrozenBatch]


def state(trial: Any) -> str:
    """Everything that a step, a forward or a backward can move."""
    gradients = [parameter.grad for parameter in trial.model.parameters()]
    numpys = np.random.get_state(legacy=False)
    return digest(
        [
            trial.model.state_dict(),
            trial.optimizer.state_dict(),
            (trial.amp if hasattr(trial, "amp") else trial).scaler.state_dict(),
            gradients,
            torch.random.get_rng_state(),
            [random.getstate(), str(numpys["state"])],
        ]
    )


class TestNothingMoves:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
    @pytest.mark.parametrize("trial", [BatchNormCNN, PreNormTransformer])
    def test_nothing_moves_in_a_users_trial(
        self, trial: type[SmallTrial], dtype: torch.dtype | None
    ) -> None:
        def work(small: SmallTrial, context: Context, batches: Batches) -> None:
            before = state(small)
            batches[0].backward(dtype, 10)
            assert state(small) == before
            trial.train_batch(small, batches[0].batch, 0, 0)  # the control: a step does move it
            assert state(small) != before

        looked_at(trial, work, steps=1)  # so that there are gradients to keep

    def test_nothing_moves_in_ours(self, caplog: pytest.LogCaptureFixture) -> None:
        raw = read_yaml(str(ROOT / "experiment_configs/mlp/amp.yaml"))
        with open_trial(with_overrides(raw, SMALL), "test") as found:
            trial = found.trial
            assert isinstance(trial, MLPTrial)

            def work(batches: Batches) -> None:
                assert trial.amp.guard.enabled is False  # neither audited nor guarded
                counts = trial.amp.state_dict()
                before = state(trial)
                batches[0].backward(torch.float16, 30)
                assert state(trial) == before
                assert trial.amp.state_dict() == counts

            in_training(trial, found.context, 1, work)
        assert not caplog.records  # nothing is trained, so a slow CPU is not worth a warning

    def test_passes_are_identical_dropout_included(self) -> None:
        def work(small: SmallTrial, context: Context, batches: Batches) -> None:
            first, again = (batches[0].backward(torch.bfloat16).parameters for _ in range(2))
            other = batches[1].backward(torch.bfloat16).parameters
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))

        looked_at(PreNormTransformer, work)


def _another_context(context: Context) -> Context:
    """The same once more: a context takes one scaler."""
    hparams, exp_conf = context.get_hparams(), context.get_experiment_config()
    return context_of(context._core, hparams, exp_conf=exp_conf)


class Doubled(FrozenBatch):
    """The loss is 2 w; whoever made it goes on using loss and gradient after the backward."""

    samples = 1

    def _pass(self, scale: float, after_backward: Callable[[torch.Tensor], None]) -> None:
        (weight,) = self._models[0].parameters()
        loss = weight.sum() * 2.0 * scale
        loss.backward()  # type: ignore[no-untyped-call]
        after_backward(loss)
        assert weight.grad is not None
        weight.grad.zero_()
        self.batch.append(loss)


class TestGradients:
    def test_gradients_are_copies_and_keep_no_graph(self) -> None:
        losses: list[torch.Tensor] = []
        batch = Doubled([nn.Linear(1, 1, bias=False)], losses)
        seen = [batch.backward(None, scale) for scale in (0, 3)]
        assert [found.parameters[0].item() for found in seen] == [2, 16]
        assert all(found.are_finite and found.loss_is_finite for found in seen)
        kept: list[torch.Tensor] = []

        def is_finite(loss: torch.Tensor) -> torch.Tensor:
            kept.append(loss)
            return torch.ones(1)

        with patched(torch, "isfinite", is_finite):
            batch.backward(None)
        assert [loss.requires_grad for loss in kept] == [False]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_gradients_are_finite_if_all_of_them_are(self, value: float) -> None:
        sound, bad = torch.ones(2), torch.tensor([1.0, value])
        assert Gradients(loss_is_finite=True, parameters=(sound, sound)).are_finite
        assert not Gradients(loss_is_finite=True, parameters=(sound, bad)).are_finite
        assert not Gradients(loss_is_finite=True, parameters=(bad, sound)).are_finite

    def test_gradients_that_no_parameter_got_are_an_error(self) -> None:
        with pytest.raises(LossScaleError, match="no parameter gets a gradient"):
            _ = Gradients(loss_is_finite=True, parameters=()).are_finite

    def test_batches_are_those_of_the_training_in_order(self) -> None:
        seen: list[torch.Tensor] = []

        class Seeing(SummedLoss):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
                seen.append(batch[1])
                return super().train_batch(batch, epoch_idx, batch_idx)

        with open_trial(config(SummedLoss), "test") as found:
            trial = Seeing(_another_context(found.context))
            train(trial, 3)

        def labels(small: SmallTrial, context: Context, batches: Batches) -> list[torch.Tensor]:
            return [frozen.batch[1] for frozen in batches]

        taken = looked_at(SummedLoss, labels, batches=3)
        assert all(torch.equal(a, b) for a, b in zip(seen, taken, strict=True))


class TestInTraining:
    """What a trial of three backwards sees of it, and what comes out."""

    class ThreeBackwards(SummedLoss):
        def __init__(self, context: Context) -> None:
            super().__init__(context)
            self.seen: list[tuple[int, int]] = []

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            self.seen.append((epoch_idx, batch_idx))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = self.scaler.scale(self.loss(*batch))
            self.context.backward(loss, retain_graph=True)
            self.context.backward(loss, None, True)  # gradient, retain_graph
            self.context.backward(loss)
            return {}

        def get_batch_length(self, batch: Any) -> int:
            return 7

    def looked_at(self, work: Callable[[Any, Batches], Any], *, batches: int = 2) -> Any:
        with open_trial(config(SummedLoss), "test") as found:
            trial = self.ThreeBackwards(_another_context(found.context))
            try:
                return in_training(trial, trial.context, batches, lambda taken: work(trial, taken))
            except det.InvalidHP as error:  # Determined's context would end the process on it
                return error

    def test_batch_is_passed_as_the_loop_gave_it_with_all_its_backwards(self) -> None:
        def work(trial: Any, batches: Batches) -> None:
            found = batches[1].backward(None)
            assert trial.seen == [(0, 1)]
            assert batches[1].samples == 7
            loss = trial.loss(*batches[1].batch)
            once = torch.autograd.grad(loss, list(trial.model.parameters()))
            for thrice, one in zip(found.parameters, once, strict=True):
                torch.testing.assert_close(thrice, 3 * one)

        self.looked_at(work)

    def test_what_the_work_returns_or_raises_comes_out(self) -> None:
        assert self.looked_at(lambda trial, batches: len(batches)) == 2
        error = det.InvalidHP("no scale")

        def work(trial: Any, batches: Batches) -> None:
            raise error

        assert self.looked_at(work) is error

    def test_loop_saves_and_reports_nothing_and_starts_where_it_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(pytorch.Trainer, "fit", lambda trainer, **named: given.update(named))
        with open_trial(config(SummedLoss), "test") as found:
            trial = self.ThreeBackwards(_another_context(found.context))
            with pytest.raises(SystemExit) as stopped:  # as where the platform asks for it
                in_training(trial, trial.context, 1, len, latest_checkpoint="batch-00000004")
        assert stopped.value.code == 0
        assert given["checkpoint_policy"] == "none"
        assert given["latest_checkpoint"] == "batch-00000004"
        assert given["reporting_period"].value == given["max_length"].value > 10**12

    def test_cause_is_that_of_float16_without_a_scale_and_moves_nothing(self) -> None:
        """Weights of 2^12 and images of 1: the first layer adds up 64 * 2^12 = 2^18."""

        def work(trial: Any, batches: Batches) -> str | None:
            assert batches[0].cause(trial.context.distributed) is None
            batches[1].batch[0][3] = math.nan
            assert "input 0 of the batch is not finite in samples [3]" in str(
                batches[1].cause(trial.context.distributed)
            )
            for parameter in trial.model.parameters():
                torch.nn.init.constant_(parameter, 2.0**12)
            batches[0].batch[0].fill_(1.0)
            before = state(trial)
            found = batches[0].cause(trial.context.distributed)
            assert state(trial) == before
            return found

        assert "forward overflow in module 1: " in str(self.looked_at(work))


class TestFloat16As:
    def test_regions_of_float16_compute_in_the_other_dtype_and_only_meanwhile(self) -> None:
        layer, inputs = nn.Linear(2, 2), torch.ones(1, 2)
        region = torch.autocast("cpu", torch.float16)  # made before, used again after
        other = torch.autocast("cpu", torch.bfloat16)
        off = torch.autocast("cpu", torch.float16, enabled=False)

        def computed(region: torch.autocast) -> torch.dtype:
            with region:
                return layer(inputs).dtype  # type: ignore[no-any-return]

        for dtype in (torch.bfloat16, None):
            with float16_as(dtype):
                assert computed(region) == (dtype or torch.float32)
                assert (computed(other), computed(off)) == (torch.bfloat16, torch.float32)
        assert computed(region) == torch.float16


class TestErrors:
    @pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_BF16])
    def test_trial_without_an_enabled_scaler_is_refused(self, precision: Precision) -> None:
        context: Any = harness.Context()
        with pytest.raises(LossScaleError, match="it has no enabled GradScaler"):
            wrapped_scaler(context)
        MixedPrecision(context, AmpSettings(precision))
        words = "for float16, set hyperparameters.amp.precision to amp_fp16"
        with pytest.raises(LossScaleError, match=words):
            wrapped_scaler(context)

    def test_trial_with_nothing_to_train_is_refused(self) -> None:
        with open_trial(config(SummedLoss), "test") as found:
            trial: Any = found.trial
            trial.model.requires_grad_(False)
            with pytest.raises(LossScaleError, match=r"leave out requires_grad_\(False\) for what"):
                in_training(trial, found.context, 1, len)

    def test_trial_that_goes_around_the_context_is_refused(self) -> None:
        class Around(SummedLoss):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
                self.scaler.scale(self.loss(*batch)).backward()
                return {}

        def work(batches: Batches) -> None:
            batches[0].backward(torch.bfloat16)

        with open_trial(config(SummedLoss), "test") as found:
            trial = Around(_another_context(found.context))
            with pytest.raises(LossScaleError, match=r"write self.context.backward\(self.scaler"):
                in_training(trial, trial.context, 1, work)
