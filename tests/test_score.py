"""`finder.score`: one best power of two, finite at every scale, and honest where none helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import determined as det
import pytest
import torch
from torch import nn

from benchmarks.small_trials import Float16Loss, SmallTrial, SummedLoss, TinyLoss
from determined_amp.finder.frozen import FrozenBatch, LossScaleError
from determined_amp.finder.score import Score, score_batches
from determined_amp.finder.verdict import find
from tests.loss_scale import Context, Trial, looked_at

Batches = Sequence[FrozenBatch]


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


@pytest.mark.parametrize("trial", [SummedLoss, Float16Loss])
def test_best_power_of_two_is_the_finders(trial: Trial) -> None:
    def work(small: SmallTrial, context: Context, batches: Batches) -> None:
        choice = find(context, batches).choice_log2
        assert choice is not None
        found = {k: score_batches(context, batches, k) for k in range(choice - 6, choice + 4)}
        assert min(found, key=lambda scale: found[scale].loss_scale_score) == choice
        assert 1 <= found[choice].headroom_bits < 2

    looked_at(trial, work)


def test_overflow_is_worse_than_anything_finite_and_counts_the_halvings() -> None:
    def work(small: SmallTrial, context: Context, batches: Batches) -> None:
        top = find(context, batches).top_log2
        good, one, three, seven = (
            score_batches(context, batches, top + bits) for bits in (-30, 1, 3, 7)
        )
        assert [found.halvings for found in (good, one, three, seven)] == [0, 1, 3, 7]
        assert good.loss_scale_score < one.loss_scale_score < seven.loss_scale_score
        assert one.overflow == 1
        assert one.headroom_bits < 0

    looked_at(SummedLoss, work)


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
