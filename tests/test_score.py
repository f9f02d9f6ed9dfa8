"""`finder.score`: bits from the finder's scale, finite, and honest where none helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import determined as det
import pytest
import torch
from torch import nn

from benchmarks.small_trials import (
    Float16Loss,
    PreNormTransformer,
    SmallTrial,
    SummedLoss,
    TinyLoss,
)
from determined_amp.finder import passes
from determined_amp.finder import score as scoring
from determined_amp.finder.frozen import FrozenBatch, Gradients, LossScaleError
from determined_amp.finder.passes import Observation, Prediction
from determined_amp.finder.score import Score, score_batches
from determined_amp.finder.verdict import Verdict, find
from tests.loss_scale import Context, Trial, looked_at, prediction_of

Batches = Sequence[FrozenBatch]


class Exact:
    """A batch with these float32 gradients, and others in float16."""

    def __init__(
        self, exact: list[list[float]], scaled: list[list[float]], scale_log2: float = 4
    ) -> None:
        self._exact, self._scaled, self._scale_log2 = exact, scaled, scale_log2

    def backward(self, dtype: torch.dtype | None, scale_log2: float = 0) -> Gradients:
        assert (dtype, scale_log2) in ((None, 0), (torch.float16, self._scale_log2))
        values = self._exact if dtype is None else self._scaled
        made = tuple(torch.tensor(value) * 2.0**scale_log2 for value in values)
        return Gradients(loss_is_finite=True, parameters=made)


class TestTerms:
    """Passes and gradients made by hand; the largest 16-bit gradient is 65520 / 2^6."""

    @pytest.fixture
    def observed(self, monkeypatch: pytest.MonkeyPatch) -> dict[float, Observation]:
        """What is observed at these scales; every other one overflows."""
        seen: dict[float, Observation] = {}
        these: list[Any] = []

        def predict(context: Any, batches: Any) -> Prediction:
            these[:] = [context, batches]
            return prediction

        def observe(context: Any, batches: Any, scale_log2: float, given: Any) -> Observation:
            assert [context, batches, given] == [*these, prediction]
            overflow = Observation(scale_log2, True, True, 0.25, -math.inf)
            return seen.get(scale_log2, overflow)

        prediction = prediction_of({"a": {9: 1}}, largest=65520 / 2**6)
        monkeypatch.setattr(scoring, "predict", predict)
        monkeypatch.setattr(scoring, "observe", observe)
        monkeypatch.setattr(
            scoring, "cause_of", lambda *given: {True: "the cause"}[[*given] == these]
        )
        return seen

    @staticmethod
    def of(scale_log2: float, *batches: Exact, other_slots: Sequence[float] = ()) -> Score:
        context: Any = type("Context", (), {})()
        context.distributed = type("Slots", (), {})()
        context.distributed.allgather = lambda mine: [mine, *other_slots]
        made: Any = batches
        return score_batches(context, made, scale_log2)

    def test_error_is_the_mean_over_tensors_batches_and_slots(
        self, observed: dict[float, Observation]
    ) -> None:
        """Half of (3, 4) is lost, then all of it and more; a gradient of 0 has no error."""
        observed[4] = Observation(4, True, False, 0.125, 1.5)
        observed[6] = Observation(6, True, False, 0.0, 0.5)
        half = Exact([[3.0, 4.0], [0.0]], [[3.0, 1.5], [0.0]])
        all_of_it = Exact([[3.0, 4.0]], [[-30.0, -40.0]])
        assert self.of(4, half).gradient_error == 0.25
        assert self.of(4, half, all_of_it).gradient_error == 0.625
        found = self.of(4, half, all_of_it, other_slots=[0.25])
        assert found == Score(1.0, 0.4375, 1.5, 0.125, 0.0)

    @pytest.mark.parametrize(
        ("scale", "top", "score"),
        [
            (5, 6, 0.0),  # one bit below the top, which is predicted to be 2^6
            (6, 6, 1.0),
            (2, 6, 3.0),
            (4.5, 6, 0.5),
            (2, 4, 1.0),  # a kernel that adds up in float16: 2^6 and 2^5 overflow
            (8, 8, 3.0),  # nothing overflows although it is predicted
        ],
    )
    def test_score_is_the_distance_to_the_scale_to_start_with(
        self, observed: dict[float, Observation], scale: float, top: int, score: float
    ) -> None:
        for at in (scale, top):
            observed[at] = Observation(at, True, False, 0.0, 0.25 + top - at)
        found = self.of(scale, Exact([[1.0]], [[1.0]], scale))
        assert (found.loss_scale_score, found.overflow) == (score, 0)
        assert found.backward_headroom_bits == 0.25 + top - scale

    def test_room_is_the_predicted_one_where_none_was_seen(
        self, observed: dict[float, Observation]
    ) -> None:
        """All is flushed, or an infinity reached no parameter: 6 bits less the scale's 4."""
        observed[4] = Observation(4, True, False, 1.0, -math.inf)
        observed[6] = Observation(6, True, False, 1.0, -math.inf)
        found = self.of(4, Exact([[1.0]], [[0.0]]))
        assert (found.backward_headroom_bits, found.loss_scale_score) == (2, 1)

    @pytest.mark.parametrize(
        ("scale", "top", "score"),
        [(16, 6, 11), (6.5, 6, 1.5), (8.25, 5, 4.25), (6, 5, 2), (5, 4, 2), (16, 4, 13)],
    )
    def test_overflow_is_so_many_bits_too_high(
        self, observed: dict[float, Observation], scale: float, top: int, score: float
    ) -> None:
        """From the power of two that bfloat16 predicts down, or from the next one below."""
        observed[0] = Observation(0, True, False, 0.0, 6.0)
        observed[top] = Observation(top, True, False, 0.0, 0.5)
        assert self.of(scale) == Score(
            loss_scale_score=score,
            gradient_error=1.0,
            backward_headroom_bits=min(6 - scale, 0.0),
            flushed_share=0.25,
            overflow=1.0,
        )

    def test_of_a_forward_that_overflows_are_none(self, observed: dict[float, Observation]) -> None:
        observed[0] = Observation(0, False, False, 0.0, 0.0)
        with pytest.raises(det.InvalidHP, match="no loss scale helps: the cause"):
            self.of(16)

    @pytest.mark.parametrize("left", [0.01, 0.0099])
    def test_of_scales_that_leave_nothing_are_none(
        self, observed: dict[float, Observation], left: float
    ) -> None:
        observed[0] = Observation(0, True, True, 0.0, 0.0)
        observed[-9] = Observation(-9, True, False, 0.0, 0.0, values_left=left)
        if left == 0.01:
            assert self.of(4).loss_scale_score == 14
        else:
            with pytest.raises(det.InvalidHP, match="no loss scale helps: the cause"):
                self.of(4)

    def test_of_a_trial_that_cannot_run_in_float32_are_none(
        self, observed: dict[float, Observation]
    ) -> None:
        class Half(Exact):
            def backward(self, dtype: torch.dtype | None, scale_log2: float = 0) -> Gradients:
                raise self.error

            error: Exception = RuntimeError("expected Half")

        observed[4] = Observation(4, True, False, 0.0, 1.5)
        observed[6] = Observation(6, True, False, 0.0, 0.5)
        batch = Half([], [])
        told = "cannot run in float32, which gradient_error is measured against: expected Half. Wr"
        with pytest.raises(LossScaleError, match=told):
            self.of(4, batch)
        batch.error = LossScaleError("a sentence")
        with pytest.raises(LossScaleError, match=r"^a sentence$"):
            self.of(4, batch)


def scores(trial: Trial, scales: Sequence[int]) -> dict[int, Score]:
    def work(small: SmallTrial, context: Context, batches: Batches) -> dict[int, Score]:
        return {scale: score_batches(context, batches, scale) for scale in scales}

    return looked_at(trial, work)


def invalid(trial: Trial, scale: int) -> str:
    def work(small: SmallTrial, context: Context, batches: Batches) -> str:
        with pytest.raises(det.InvalidHP) as error:  # which Determined's context makes an exit of
            score_batches(context, batches, scale)
        return str(error.value)

    return looked_at(trial, work)


@pytest.mark.parametrize(
    ("trial", "verdict"),
    [
        (SummedLoss, Verdict.SCALE),
        (Float16Loss, Verdict.SCALE),
        (PreNormTransformer, Verdict.DEFAULT),
    ],
)
def test_scores_are_a_v_whose_tip_is_the_finders_choice(trial: Trial, verdict: Verdict) -> None:
    """Also across the edge of float16, on both sides of which every scale has a score."""

    def work(small: SmallTrial, context: Context, batches: Batches) -> None:
        finding = find(context, batches)
        choice, top = finding.choice_log2, finding.top_log2
        assert choice is not None
        assert finding.verdict is verdict
        scales = [*range(choice - 3, choice + 2), choice - 30, top, top + 1, top + 7]
        found = {k: score_batches(context, batches, k) for k in scales}
        assert {k: score.loss_scale_score for k, score in found.items()} == {
            k: abs(k - choice) for k in scales
        }
        assert {k for k in found if found[k].overflow} == {k for k in scales if k > top}
        assert found[top].backward_headroom_bits > 0 > found[top + 1].backward_headroom_bits

    looked_at(trial, work)


def test_scale_beyond_float32_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of this loss would bear 2^128 and more."""
    loss, tried = SummedLoss.loss, list[float]()
    monkeypatch.setattr(SummedLoss, "loss", lambda *given: loss(*given) * 2.0**-125)

    def observe(context: Any, batches: Any, scale_log2: float, prediction: Any) -> Observation:
        tried.append(scale_log2)
        return really(context, batches, scale_log2, prediction)

    really = passes.observe
    monkeypatch.setattr(scoring, "observe", observe)
    assert scores(SummedLoss, [120])[120].loss_scale_score == 6
    assert tried == [120, 127]


def test_is_finite_where_everything_is_flushed() -> None:
    found = scores(TinyLoss, [-20, 30])
    assert found[-20].flushed_share == found[-20].gradient_error == 1.0
    assert all(math.isfinite(value) for value in vars(found[-20]).values())
    assert found[30].loss_scale_score < found[-20].loss_scale_score


def test_forward_overflow_is_no_scale_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_model(trial: SmallTrial) -> nn.Module:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        nn.init.constant_(model[1].get_parameter("weight"), 20000.0)
        return model

    monkeypatch.setattr(SummedLoss, "make_model", make_model)
    assert "no loss scale helps: forward overflow in module 1" in invalid(SummedLoss, 10)


def test_cause_is_looked_for_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward overflows in the second batch alone."""
    loss, seen = SummedLoss.loss, list[Any]()

    def loss_of(trial: SummedLoss, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not any(images is other for other in seen):
            seen.append(images)
        return loss(trial, images * (1.0e6 if images is seen[-1] and len(seen) == 2 else 1), labels)

    monkeypatch.setattr(SummedLoss, "loss", loss_of)
    assert "forward overflow in module 1" in invalid(SummedLoss, 0)


def test_gradients_that_are_all_zero_have_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = SummedLoss.loss
    monkeypatch.setattr(SummedLoss, "loss", lambda *given: loss(*given) * 0.0)
    with pytest.raises(LossScaleError, match="all 16-bit gradients are exactly 0"):
        scores(SummedLoss, [10])


def test_gradients_set_to_zero_after_the_step_are_still_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_batch = SummedLoss.train_batch

    def train_and_clear(trial: SummedLoss, *batch: Any) -> dict[str, Any]:
        metrics = train_batch(trial, *batch)
        trial.optimizer.zero_grad()
        return metrics

    plain = scores(SummedLoss, [8])
    monkeypatch.setattr(SummedLoss, "train_batch", train_and_clear)
    assert scores(SummedLoss, [8]) == plain
