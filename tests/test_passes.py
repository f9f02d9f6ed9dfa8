"""`finder.passes`: several batches on several slots are one; passes are made by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from determined_amp.finder import passes
from determined_amp.finder.frozen import FrozenBatch, LossScaleError
from determined_amp.finder.histogram import Histogram
from determined_amp.finder.passes import Prediction, _Passes, cause_of, observe, predict
from determined_amp.finder.recorder import Source
from tests.loss_scale import histogram, prediction_of

BF16, FP16 = frozenset([torch.bfloat16]), frozenset([torch.float16])
A, B = (Source(name, "mm", 0, (1,)) for name in "ab")
Here = Callable[[torch.dtype, float], _Passes]


def made(
    tensors: dict[Source, Histogram] | None = None,
    largest: float = 1.0,
    dtypes: frozenset[torch.dtype] = BF16,
    *,
    loss: bool = True,
    gradients: bool = True,
) -> _Passes:
    counted = {A: histogram({0: 1})} if tensors is None else tensors
    return _Passes(loss, gradients, counted, largest, dtypes)


def slots(*others: Any, models: Sequence[nn.Module] = ()) -> Any:
    """A context with this slot and others, which say this."""
    gather = SimpleNamespace(allgather=lambda mine: [mine, *others])
    return SimpleNamespace(models=list(models), distributed=gather)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Here], None]:
    """Have the passes of this slot made by a function of dtype and scale."""

    def make(what: Here) -> None:
        def passed(context: Any, batches: list[FrozenBatch], *of: Any) -> _Passes:
            assert batches == []
            return what(*of)

        monkeypatch.setattr(passes, "_here", passed)

    return make


class Scaled(FrozenBatch):
    """The loss is the sum of `factor * w`, from w = 1 in float16."""

    samples = 1

    def __init__(self, model: nn.Linear, factor: float) -> None:
        super().__init__([model], torch.full((1, 1), factor))
        self.model = model

    def _pass(self, scale: float, after_backward: Callable[[torch.Tensor], None]) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = self.model(self.batch).float().sum() * scale
        loss.backward()
        after_backward(loss)


def batches(*factors: float) -> tuple[Any, list[FrozenBatch]]:
    """A context of one slot, and a batch for each factor."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return slots(models=[model]), [Scaled(model, factor) for factor in factors]


class TestSeveralBatches:
    @pytest.mark.parametrize("factors", [(8.0, 0.5), (0.5, 8.0)])
    def test_batches_are_counted_together(self, factors: tuple[float, float]) -> None:
        context, frozen = batches(*factors)
        prediction = predict(context, frozen)
        assert prediction.largest == 8
        assert {-1: 1, 3: 1}.items() <= prediction.total.by_power().items()
        assert (prediction.recorded_log2, prediction.reason) == (None, "")

    @pytest.mark.parametrize("factors", [(2.0**10, 1.0), (1.0, 2.0**10)])
    def test_batches_overflow_if_one_of_them_does(self, factors: tuple[float, float]) -> None:
        """The gradient of the weight is the factor times the scale."""
        context, frozen = batches(*factors)
        prediction = predict(context, frozen)
        assert prediction.first_overflow_log2 == 6
        assert not observe(context, frozen, 5, prediction).overflow
        seen = observe(context, frozen, 6, prediction)
        assert (seen.overflow, seen.backward_headroom_bits, seen.scale_log2) == (True, -math.inf, 6)

    @pytest.mark.parametrize("factors", [(math.inf, 1.0), (1.0, math.inf)])
    def test_batches_with_a_loss_that_is_not_finite_are_refused(
        self, factors: tuple[float, float]
    ) -> None:
        with pytest.raises(LossScaleError, match="the loss is not finite, although bfloat16"):
            predict(*batches(*factors))


class TestSeveralSlots:
    def test_slots_are_counted_together(self, here: Callable[[Here], None]) -> None:
        here(lambda dtype, scale: made({A: histogram({0: 1})}, largest=1.0))
        other = made({A: histogram({0: 2}), B: histogram({5: 1})}, largest=32.0)
        prediction = predict(slots((other, "")), [])
        assert {s: h.by_power() for s, h in prediction.tensors.items()} == {A: {0: 3}, B: {5: 1}}
        assert prediction.largest == 32

    @pytest.mark.parametrize("fault", ["loss", "gradients"])
    @pytest.mark.parametrize("mine", [False, True])
    def test_slots_overflow_if_one_of_them_does(
        self, here: Callable[[Here], None], fault: str, *, mine: bool
    ) -> None:
        sound = made(dtypes=FP16)
        faulty = made(dtypes=FP16, loss=fault != "loss", gradients=fault != "gradients")
        here(lambda dtype, scale: faulty if mine else sound)
        seen = observe(slots(sound if mine else faulty), [], 3, prediction_of({"a": {0: 1}}))
        assert seen.overflow is (fault == "gradients")
        assert seen.loss_is_finite is (fault == "gradients")

    def test_slots_make_float16_if_one_of_them_does(self, here: Callable[[Here], None]) -> None:
        here(lambda dtype, scale: made({}, dtypes=frozenset()))
        seen = observe(slots(made(dtypes=FP16)), [], 0, prediction_of({"a": {0: 1}}))
        assert seen.values_left == 1

    def test_slots_go_to_float16_together(self, here: Callable[[Here], None]) -> None:
        """One rank cannot run in bfloat16; the first reason there is, is told."""
        here(lambda dtype, scale: made(dtypes=frozenset([dtype]), largest=2.0**scale))
        told = []

        class Gather:
            def allgather(self, mine: Any) -> list[Any]:
                told.append(mine)
                return [mine, (None, "no kernel")] if isinstance(mine, tuple) else [mine, mine]

        context: Any = SimpleNamespace(models=[], distributed=Gather())
        prediction = predict(context, [])
        assert prediction.reason == "no kernel"
        assert told[0][1] == ""

    def test_slots_tell_the_first_cause(self) -> None:
        knows: Any = SimpleNamespace(cause=lambda slots: "mine")
        nothing: Any = SimpleNamespace(cause=lambda slots: None)
        assert cause_of(slots(None), [nothing, knows]) == "mine"
        assert cause_of(slots(None, "other"), [nothing]) == "other"
        assert cause_of(slots(None), []) == "its source was not found"
        fails: Any = SimpleNamespace(cause=lambda distributed: 1 / 0)
        said = "not found: training the batch again raised division by zero"
        assert cause_of(slots(None), [fails]) == said


class TestFromFloat16:
    """Where bfloat16 fails, with a largest gradient of 1 and float16's own range."""

    @pytest.fixture
    def asked(self, here: Callable[[Here], None]) -> list[float]:
        """The scales that float16 was tried at."""
        scales: list[float] = []

        def passed(dtype: torch.dtype, scale: float) -> _Passes:
            if dtype is torch.bfloat16:
                raise RuntimeError("no kernel\nfor this")
            scales.append(scale)
            largest = 2.0**scale if scale < 16 else math.inf
            return made({A: histogram({int(scale): 3})}, largest, FP16, gradients=scale < 16)

        here(passed)
        return scales

    def test_float16_is_recorded_near_the_top(self, asked: list[float]) -> None:
        """At 2^16 it overflows; at 2^8 there are 7.9 bits of room, of which one is kept."""
        prediction = predict(slots(), [])
        assert asked == [16, 8, 14]
        assert prediction.recorded_log2 == 14
        assert prediction.reason == "RuntimeError: no kernel"
        assert prediction.largest == 1
        assert prediction.total.by_power() == {0: 3}

    def test_float16_is_recorded_lower_where_that_overflows(
        self, here: Callable[[Here], None]
    ) -> None:
        def passed(dtype: torch.dtype, scale: float) -> _Passes:
            if dtype is torch.bfloat16:
                raise RuntimeError
            return made({A: histogram({0: 1})}, 2.0, FP16, loss=scale <= 8)

        here(passed)
        prediction = predict(slots(), [])
        assert (prediction.recorded_log2, prediction.largest) == (8, 2.0**-7)
        assert prediction.reason == "RuntimeError: no message"

    def test_float16_that_overflows_at_every_scale_is_refused(
        self, here: Callable[[Here], None]
    ) -> None:
        def passed(dtype: torch.dtype, scale: float) -> _Passes:
            if dtype is torch.bfloat16:
                raise RuntimeError("no kernel")
            return made(largest=0.0, dtypes=FP16)

        here(passed)
        with pytest.raises(LossScaleError, match=r"no kernel; and .* from 2\^-16 to 2\^80"):
            predict(slots(), [])

    def test_float16_is_used_where_bfloat16_makes_float16_tensors_too(
        self, here: Callable[[Here], None]
    ) -> None:
        here(lambda dtype, scale: made(dtypes=FP16 | BF16))
        assert "float16 tensors outside autocast" in predict(slots(), []).reason

    def test_fallback_to_float16_hides_no_mistake_of_the_user(
        self, here: Callable[[Here], None]
    ) -> None:
        def passed(dtype: torch.dtype, scale: float) -> _Passes:
            raise LossScaleError("a sentence")

        here(passed)
        with pytest.raises(LossScaleError, match=r"^a sentence$"):
            predict(slots(), [])


class TestObservation:
    PREDICTION = prediction_of({"a": {-127: 2, -30: 3, 0: 1}, "b": {0: 4}})

    def test_observation_counts_the_zeros_that_were_none_before(
        self, here: Callable[[Here], None]
    ) -> None:
        """Three of eight values are flushed in one tensor, of which they are sqrt(3) 2^-30."""
        flushed = {A: histogram({-127: 5, 0: 1}), B: histogram({0: 4})}
        here(lambda dtype, scale: made(flushed, 1.0, FP16))
        seen = observe(slots(), [], 0, self.PREDICTION)
        assert seen.flushed_share == pytest.approx(3**0.5 * 2.0**-30, rel=1e-6)
        assert seen.values_left == 1 - 3 / 8
        assert seen.backward_headroom_bits == pytest.approx(math.log2(65520))

    def test_observation_counts_no_zeros_of_tensors_that_bfloat16_did_not_make(
        self, here: Callable[[Here], None]
    ) -> None:
        other = Source("a", "sum", 0, (1,))
        tensors = {A: histogram({-127: 1, -30: 4, 0: 1}), other: histogram({-127: 9})}
        here(lambda dtype, scale: made(tensors, 65520.0, FP16))
        seen = observe(slots(), [], 0, self.PREDICTION)
        assert (seen.flushed_share, seen.values_left) == (0, 1)
        assert seen.backward_headroom_bits == 0

    def test_observation_of_nothing_leaves_everything(self, here: Callable[[Here], None]) -> None:
        here(lambda dtype, scale: made({}, 0.0, FP16))
        seen = observe(slots(), [], 0, prediction_of({}))
        assert (seen.flushed_share, seen.values_left) == (0, 1)
        assert seen.backward_headroom_bits == -math.inf

    @pytest.mark.parametrize(("dtypes", "named"), [(BF16, "bfloat16"), (frozenset(), "no 16-bit")])
    def test_observation_without_float16_is_refused(
        self, here: Callable[[Here], None], dtypes: frozenset[torch.dtype], named: str
    ) -> None:
        here(lambda dtype, scale: made(dtypes=dtypes))
        with pytest.raises(LossScaleError, match=f"makes {named} tensors, none in float16"):
            observe(slots(), [], 0, self.PREDICTION)


class TestPrediction:
    def test_prediction_is_limited_by_the_tensor_that_suffers_most(self) -> None:
        prediction = prediction_of({"a": {0: 1}, "b": {-30: 1}, "c": {}})
        assert (prediction.first_overflow_log2, prediction.smallest_scale_log2(0.001)) == (16, 6)
        assert [prediction.flushed_share(scale) for scale in (6, 5, -24, -25)] == [0, 1, 1, 1]
        assert prediction_of({}).flushed_share(0) == 0

    def test_prediction_of_some_modules_is_theirs(self) -> None:
        prediction = prediction_of({"a": {0: 1}, "b": {-30: 1}}, largest=1.0)
        part = prediction.of(lambda name: name == "b")
        assert (part.total.by_power(), part.largest) == ({-30: 1}, 1.0)
        assert list(prediction.modules) == ["a", "b"]

    def test_prediction_knows_its_room_to_a_fraction_of_a_bit(self) -> None:
        """65520 is the first magnitude that float16 rounds to infinity; 65504 is its largest."""
        assert prediction_of({}, largest=65520.0).headroom_log2 == 0
        assert prediction_of({}, largest=65520.0 / 8).headroom_log2 == 3

    def test_prediction_of_gradients_that_are_all_zero_is_refused(self) -> None:
        with pytest.raises(LossScaleError, match="all 16-bit gradients are exactly 0"):
            prediction_of({"a": {-127: 3}}).require_gradients()

    def test_prediction_of_gradients_that_are_not_finite_is_refused(self) -> None:
        infinite = dataclasses.replace(prediction_of({}), tensors={A: histogram({128: 1})})
        with pytest.raises(LossScaleError, match="not finite in bfloat16"):
            infinite.require_gradients()

    def test_prediction_of_no_16_bit_tensor_is_refused(self, here: Callable[[Here], None]) -> None:
        here(lambda dtype, scale: made({}))
        with pytest.raises(LossScaleError, match="no backward makes a 16-bit gradient"):
            predict(slots(), [])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_prediction_of_parameters_in_16_bits_is_refused(
        self, here: Callable[[Here], None], dtype: torch.dtype
    ) -> None:
        here(lambda dtype, scale: made())
        frozen, trained = nn.Linear(1, 1).to(dtype), nn.Linear(1, 1).to(dtype)
        frozen.requires_grad_(requires_grad=False)
        assert isinstance(predict(slots((made(), ""), models=[frozen]), []), Prediction)
        with pytest.raises(LossScaleError, match=r"parameters are b?float16, as after"):
            predict(slots(models=[nn.Linear(1, 1), trained]), [])
