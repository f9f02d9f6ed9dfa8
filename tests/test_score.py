"""`finder.score`: the optimizer steps that a loss scale loses, measured, and finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import determined as det
import pytest
import torch
from determined import pytorch

from benchmarks.small_trials import (
    DeepPlain,
    Float16Loss,
    PreNormTransformer,
    SmallTrial,
    SummedLoss,
    TinyLoss,
)
from determined_amp.amp.patched import patched
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.overrides import with_overrides
from determined_amp.finder import score as scoring
from determined_amp.finder.frozen import FrozenBatch, Gradients, LossScaleError
from determined_amp.finder.passes import Observation, Prediction, predict
from determined_amp.finder.score import score_batches, worth_of_best
from determined_amp.finder.score_metrics import Score
from determined_amp.finder.verdict import FLUSHED_LIMIT, find
from determined_amp.local.open_trial import open_trial
from determined_amp.trial.frozen import score
from tests.loss_scale import Context, Trial, config, looked_at, prediction_of
from tests.training import ROOT, SMALL

T = TypeVar("T")

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
    """Float16 passes made by hand; bfloat16 predicts an overflow from 2^6 on."""

    class Float16:
        """What is measured: nothing overflows up to 2^top, and below 2^-30 all is flushed.

        Attributes:
            top: As above.
            room: Bits from the largest value to an overflow, where the kernels overflow inside.
            share: What is flushed at any scale.
            left: `values_left` at any scale.
            forward: log2 of the scale from which on the loss is not finite.
            measured: log2 of the scales of the passes so far.
        """

        def __init__(self) -> None:
            self.top, self.room, self.share, self.left = 6.0, 0.0, 0.0, 1.0
            self.forward = math.inf
            self.measured: list[float] = []

        def at(self, scale_log2: float) -> Observation:
            self.measured.append(scale_log2)
            overflow = scale_log2 > self.top
            seen = scale_log2 > -30 and not overflow
            headroom = self.top + self.room + 0.5 - scale_log2 if seen else -math.inf
            finite = scale_log2 < self.forward
            return Observation(scale_log2, finite, overflow, self.share, headroom, self.left)

    @pytest.fixture
    def float16(self, monkeypatch: pytest.MonkeyPatch) -> Float16:
        made, these = self.Float16(), list[Any]()

        def predicted(context: Any, batches: Any) -> Prediction:
            these[:] = [context, batches]
            return prediction

        def observe(context: Any, batches: Any, scale_log2: float, given: Any) -> Observation:
            assert [context, batches, given] == [*these, prediction]
            return made.at(scale_log2)

        def cause(context: Any, batches: Any) -> str:
            assert [context, batches] == these
            return "the cause"

        prediction = prediction_of({"a": {9: 1}}, largest=65520 / 2**6)
        monkeypatch.setattr(scoring, "predict", predicted)
        monkeypatch.setattr(scoring, "observe", observe)
        monkeypatch.setattr(scoring, "cause_of", cause)
        return made

    @staticmethod
    def of(
        scale_log2: float, *batches: Exact, other_slots: Sequence[float] = (), **scaler: Any
    ) -> Score:
        context: Any = type("Context", (), {})()
        context.distributed = type("Slots", (), {})()
        context.distributed.allgather = lambda mine: [mine, *other_slots]
        made: Any = batches or [Exact([[1.0]], [[1.0]], scale_log2)]
        return score_batches(context, made, scale_log2, **scaler)

    def test_error_is_the_mean_over_tensors_batches_and_slots(self, float16: Float16) -> None:
        """Half of (3, 4) is lost, then all of it and more; a gradient of 0 has no error."""
        half = Exact([[3.0, 4.0], [0.0]], [[3.0, 1.5], [0.0]])
        all_of_it = Exact([[3.0, 4.0]], [[-30.0, -40.0]])
        assert self.of(4, half).gradient_error == 0.25
        assert self.of(4, half, all_of_it).gradient_error == 0.625
        found = self.of(4, half, all_of_it, other_slots=[0.25])
        assert found == Score(4, 0.0, 0.0, 0.4375, 2.5, 0.0, 0.0)

    @pytest.mark.parametrize("start", [127, 30.25, 16, 0.5, -2, -20, -99.75])
    def test_skipped_steps_are_counted_wherever_overflow_ends(
        self, float16: Float16, start: float
    ) -> None:
        """With few passes, also where the room that is measured says nothing true."""
        for float16.top in (127, 100.25, 41, 40, 17, 6.5, 6, 0, -1, -25, -60.5, -100, -126):
            for float16.room in (0, 1, 3, 12, -2):
                float16.measured.clear()
                skipped = max(0, math.ceil(start - float16.top))
                assert self.of(start).steps_lost == skipped
                assert len({*float16.measured}) == len(float16.measured)
                exact = float16.room == 0 and 0 < float16.top < start
                assert len(float16.measured) <= (6 if exact else 12)

    @pytest.mark.parametrize(
        ("start", "factor", "skipped"), [(16, 0.25, 5), (7, 0.25, 1), (16, 0.75, 25), (6, 0.25, 0)]
    )
    def test_backoff_factor_of_the_scaler_is_what_a_skipped_step_takes(
        self, float16: Float16, start: float, factor: float, skipped: int
    ) -> None:
        assert self.of(start, backoff_factor=factor).steps_lost == skipped

    @pytest.mark.parametrize(
        ("start", "share", "interval", "steps"),
        [
            (5, FLUSHED_LIMIT, 2000, 0.0),
            (5, 0.0011, 2000, 2.2),
            (5, 1.0, 2000, 2000.0),
            (5, 0.5, 40, 20.0),
            (10, 0.25, 2000, 504.0),  # of the scale that the training then starts with
            (10, FLUSHED_LIMIT, 2000, 4.0),
        ],
    )
    def test_lost_share_counts_above_the_windows_limit(
        self, float16: Float16, start: float, share: float, interval: int, steps: float
    ) -> None:
        float16.share = share
        found = self.of(start, growth_interval=interval)
        assert found.steps_lost == pytest.approx(steps)
        assert found.loss_scale_score == pytest.approx(math.log2(1 + steps))
        assert found.flushed_share == share

    def test_room_is_the_measured_one_less_the_bits_of_the_skipped_steps(
        self, float16: Float16
    ) -> None:
        assert self.of(4).backward_headroom_bits == 2.5
        assert self.of(16).backward_headroom_bits == -9.5
        float16.room = 2.0
        assert self.of(7).backward_headroom_bits == 0.0  # the kernel overflows inside

    def test_room_is_the_predicted_one_where_all_is_flushed(self, float16: Float16) -> None:
        """6 bits and the scale's 40."""
        assert self.of(-40).backward_headroom_bits == 46

    def test_overflow_has_no_gradient_error(self, float16: Float16) -> None:
        assert self.of(9) == Score(9.0, 2.0, 3.0, 1.0, -2.5, 0.0, 1.0)

    @pytest.mark.parametrize("start", [16, 0, -3])
    def test_forward_that_overflows_has_no_terms(self, float16: Float16, start: int) -> None:
        float16.top, float16.forward = -math.inf, -math.inf
        with pytest.raises(det.InvalidHP, match=r"^no loss scale helps: the cause$"):
            self.of(start)
        assert len(float16.measured) == 2

    def test_loss_that_overflows_at_large_scales_alone_has_a_score(self, float16: Float16) -> None:
        float16.forward = 3
        float16.top = -4
        assert self.of(16).steps_lost == 20

    def test_overflow_at_every_scale_has_no_terms(self, float16: Float16) -> None:
        float16.top = -math.inf
        with pytest.raises(det.InvalidHP, match="no loss scale helps: the cause"):
            self.of(16)

    @pytest.mark.parametrize("left", [0.01, 0.0099])
    def test_scales_that_leave_nothing_have_no_terms(self, float16: Float16, left: float) -> None:
        float16.left, float16.top = left, -9
        if left == 0.01:
            assert self.of(4).steps_lost == 13
        else:
            with pytest.raises(det.InvalidHP, match="no loss scale helps: the cause"):
                self.of(4)
            assert self.of(-9).steps_lost == 0  # nothing was skipped: it costs what it costs

    @pytest.mark.parametrize(("top", "steps"), [(0, 9), (0.5, 8), (1.5, 7), (-0.5, None)])
    def test_scale_stays_above_its_floor(
        self, float16: Float16, top: float, steps: int | None
    ) -> None:
        float16.top = top
        if steps is not None:
            assert self.of(8.5, min_scale=1.0).steps_lost == steps
        else:
            told = r"helps from 2\^0 up, which is amp.min_scale: steps overflow even there; allowed"
            with pytest.raises(det.InvalidHP, match=told):
                self.of(8.5, min_scale=1.0)
        assert min(float16.measured) >= 0

    def test_trial_that_cannot_run_in_float32_has_no_terms(self, float16: Float16) -> None:
        class Half(Exact):
            def backward(self, dtype: torch.dtype | None, scale_log2: float = 0) -> Gradients:
                raise self.error

            error: Exception = RuntimeError("expected Half")

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


def skipped_in_training(trial: Trial, init_scale: float) -> int:
    """Steps that a real training on one batch skips until the first is applied."""
    with open_trial(config(trial, init_scale=init_scale), trial.__name__) as found:
        small = found.trial
        assert isinstance(small, SmallTrial)
        train_batch, first = small.train_batch, list[Any]()

        def until_applied(batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            first.append(batch)
            metrics = train_batch(first[0], epoch_idx, batch_idx)
            if small.skipped_steps <= batch_idx:
                raise pytorch._ShouldExit(skip_exit_checkpoint=True)
            return metrics

        with patched(small, "train_batch", until_applied):
            pytorch.Trainer(small, small.context).fit(max_length=pytorch.Batch(200))
        return small.skipped_steps


TRIALS = [SummedLoss, TinyLoss, PreNormTransformer, Float16Loss]


@pytest.mark.parametrize("trial", TRIALS)
class TestSmallTrials:
    def test_score_is_zero_all_through_the_measured_window_and_rises_on_both_sides(
        self, trial: Trial
    ) -> None:
        def work(small: SmallTrial, context: Context, batches: Batches) -> None:
            prediction, finding = predict(context, batches), find(context, batches)
            scales = range(finding.low_log2 - 3, finding.top_log2 + 4)
            found = {k: score_batches(context, batches, k).loss_scale_score for k in scales}
            applied = {
                k for k in scales if all(b.backward(torch.float16, k).are_finite for b in batches)
            }
            window = {k for k in applied if prediction.flushed_share(k) <= FLUSHED_LIMIT}
            free = {k for k in scales if found[k] == 0}
            # float16 rounds a value to the other side of the flush now and then.
            near = {finding.low_log2 + bit for bit in (-1, 0, 1)}
            assert free - near == window - near
            assert len(window) > 20
            falls = [found[k] for k in scales if k <= min(free)]
            rises = [found[k] for k in scales if k >= max(free)]
            assert falls == sorted({*falls}, reverse=True)
            assert rises == sorted({*rises})
            assert min(len(falls), len(rises)) >= 3

        looked_at(trial, work, batches=1)

    @pytest.mark.parametrize("above", [0, 1, 4.25, 20])
    def test_steps_lost_above_the_window_are_those_that_a_training_skips(
        self, trial: Trial, above: float
    ) -> None:
        def work(small: SmallTrial, context: Context, batches: Batches) -> tuple[float, Score]:
            scale = find(context, batches).top_log2 + above
            return scale, score_batches(context, batches, scale)

        scale, found = looked_at(trial, work, batches=1)
        skipped = skipped_in_training(trial, 2.0**scale)
        assert found.steps_lost == skipped
        assert found.loss_scale_score == math.log2(1 + skipped)
        assert abs(skipped - above) < 1  # the control
        assert found.overflow == (skipped > 0)

    def test_steps_lost_below_the_window_are_the_share_of_a_growth_interval(
        self, trial: Trial
    ) -> None:
        def work(small: SmallTrial, context: Context, batches: Batches) -> None:
            prediction, low = predict(context, batches), find(context, batches).low_log2
            for scale in (low - 2, low - 3, low - 6, low - 60):
                for interval in (2000, 10):
                    found = score_batches(context, batches, scale, growth_interval=interval)
                    share = found.flushed_share
                    assert found.loss_scale_score == math.log2(1 + share * interval)
                    within_a_bit = [prediction.flushed_share(scale + bit) for bit in (1, -1)]
                    assert within_a_bit[0] * 0.9 <= share <= within_a_bit[1] * 1.1
                    assert share > FLUSHED_LIMIT
            kept = score_batches(context, batches, low)  # the control
            assert kept.steps_lost == 0 <= kept.flushed_share <= FLUSHED_LIMIT

        looked_at(trial, work, batches=1)


def test_score_asks_no_prediction_of_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would prove nothing."""

    def wrong(*given: object) -> int:
        raise AssertionError

    def work(small: SmallTrial, context: Context, batches: Batches) -> None:
        top = find(context, batches).top_log2
        for name in ("first_overflow_log2", "headroom_log2"):
            monkeypatch.setattr(Prediction, name, property(wrong))
        monkeypatch.setattr(Prediction, "smallest_scale_log2", wrong)
        for above in (0, 9):
            assert score_batches(context, batches, top + above).steps_lost == above

    looked_at(SummedLoss, work, batches=1)


def test_no_scale_of_a_trial_without_a_window_is_free() -> None:
    """The best is at the top, where the fewest gradients are flushed."""
    found = scores(DeepPlain, [14, 18, 19, 22])
    assert min(score.loss_scale_score for score in found.values()) > 5
    assert min(found, key=lambda scale: found[scale].loss_scale_score) == 18


def test_scaler_of_the_trial_says_what_a_skip_and_a_flushed_share_cost() -> None:
    def scored(trial: Trial, scale: int) -> tuple[float, float]:
        with open_trial(config(trial, init_scale=2.0**scale), trial.__name__) as found:
            assert isinstance(found.trial, SmallTrial)
            found.trial.scaler.set_backoff_factor(0.25)
            found.trial.scaler.set_growth_interval(10)
            metrics = score(found.trial, found.context, 1)
            return metrics["steps_lost"], metrics["flushed_share"]

    assert scored(SummedLoss, 21) == (5, 0)
    assert scored(TinyLoss, -20) == (10, 1)


@pytest.mark.parametrize(("floor", "invalid"), [(2.0**18, False), (2.0**21, True)])
def test_floor_of_the_settings_is_the_end_of_the_scales(floor: float, invalid: bool) -> None:
    """Of the MLP, whose gradients overflow above 2^18 or 2^19."""
    scales = [f"hyperparameters.amp.{key}={floor}" for key in ("init_scale", "min_scale")]
    mlp = with_overrides(
        read_yaml(str(ROOT / "experiment_configs/mlp/amp.yaml")), [*SMALL, *scales]
    )
    with open_trial(mlp, "mlp") as found:
        if invalid:
            with pytest.raises(det.InvalidHP, match=r"from 2\^21 up, which is amp.min_scale"):
                score(found.trial, found.context, 1)
        else:
            assert score(found.trial, found.context, 1)["steps_lost"] == 0


def test_score_is_finite_where_everything_is_flushed() -> None:
    found = scores(TinyLoss, [-20, 30])
    assert found[-20].flushed_share == found[-20].gradient_error == 1.0
    assert all(math.isfinite(value) for value in vars(found[-20]).values())
    assert found[30].loss_scale_score < found[-20].loss_scale_score


def test_cause_is_looked_for_in_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward overflows in the second batch alone."""
    loss, seen = SummedLoss.loss, list[Any]()

    def loss_of(trial: SummedLoss, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(images.clone())
        return loss(trial, images * (1.0 if torch.equal(images, seen[0]) else 1.0e6), labels)

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


def trials(*steps: float | None) -> list[tuple[float, float | None]]:
    """Trials at 2^14, 2^15 and so on that lose so many steps."""
    return [(14.0 + i, lost) for i, lost in enumerate(steps)]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            trials(3, 0, 0, 0, 2),
            "no step is lost in 3 of 5 trials, at 2^15 to 2^17: a search can find nothing better. "
            "The best trial is the one of these that is nearest to PyTorch's default, 2^16",
        ),
        (trials(3, 0.5, 4), "every scale of this search loses steps, and the best one 0.5"),
        ([], None),
        (trials(0), None),
        (trials(0, None), None),
        ([*trials(0), (math.nan, 0.0)], None),
    ],
)
def test_worth_of_the_best_trial_is_a_true_sentence(
    found: list[tuple[float, float | None]], sentence: str | None
) -> None:
    assert worth_of_best("loss_scale_score", found) == sentence
    assert worth_of_best("gradient_error", found) is None
