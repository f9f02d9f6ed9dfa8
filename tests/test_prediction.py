"""`finder.prediction`: batches and slots are counted together, and what cannot be is
said.
"""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from determined_amp.amp.rehearse.rehearsal import Rehearsal
from determined_amp.amp.slots import OneSlot
from determined_amp.finder.gradient_recorder import Source
from determined_amp.finder.prediction import (
    LossScaleError,
    any_overflow_at,
    cause_of,
    predict_float16,
)
from tests.loss_scale import histogram, powers_in, prediction_of

ONE, ONES = OneSlot(), torch.ones(1, 1)


def slots(*others):
    """This slot and others, which say this."""
    return SimpleNamespace(
        rank=0, size=1 + len(others), allgather=lambda mine: [mine, *others]
    )


def of(*models, loss, cast=torch.float16):
    """One batch with this loss, in autocast."""

    def train(scale):
        with torch.autocast("cpu", cast, enabled=cast is not None):
            made = loss()
        torch.autograd.backward(made.float().sum() * (scale or 1.0))

    return [Rehearsal(train, models)]


def scaled(*factors, **options):
    """A batch for each factor: the loss is the sum of `factor * w`, from w = 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    made = []
    for factor in factors:
        made += of(model, loss=partial(model, torch.full((1, 1), factor)), **options)
    return made


class TestSeveral:
    @pytest.mark.parametrize("factors", [(8.0, 0.5), (0.5, 8.0)])
    def test_batches_are_counted_together(self, factors):
        prediction = predict_float16(scaled(*factors), ONE)
        assert prediction.total.largest == 8
        assert {-1: 1, 3: 1}.items() <= powers_in(prediction.total).items()

    @pytest.mark.parametrize("factors", [(2.0**10, 1.0), (1.0, 2.0**10)])
    def test_batches_overflow_if_one_of_them_does(self, factors):
        """The gradient of the weight is the factor times the scale."""
        rehearsals = scaled(*factors)
        assert predict_float16(rehearsals, ONE).first_overflow_log2 == 6
        assert [any_overflow_at(rehearsals, ONE, scale) for scale in (5, 6)] == [
            False,
            True,
        ]

    def test_slots_are_counted_together(self):
        source = Source("b", "mm", 0, (1,))
        prediction = predict_float16(
            scaled(1.0), slots((None, {source: histogram({5: 1})}))
        )
        assert powers_in(prediction.tensors[source]) == {5: 1}
        assert prediction.total.largest == 32

    def test_problem_of_another_slot_is_raised_here_too(self):
        with pytest.raises(LossScaleError, match=r"^no kernel there$"):
            predict_float16(scaled(1.0), slots(("no kernel there", {})))

    def test_cause_is_that_of_the_first_batch_that_has_one(self):
        rehearsals = scaled(1.0, 2.0**20)
        assert "module the model" in cause_of(rehearsals, ONE)
        assert cause_of(rehearsals[:1], ONE) == "its source was not found"
        assert "at 2^15 nothing overflows" in cause_of(rehearsals[:1], ONE, 20.0)


class TestPrediction:
    def test_prediction_is_limited_by_the_tensor_that_suffers_most(self):
        prediction = prediction_of({"a": {0: 1}, "b": {-30: 1}, "c": {}})
        assert (
            prediction.first_overflow_log2,
            prediction.smallest_scale_log2(0.001),
        ) == (16, 6)
        assert [prediction.flushed_share(scale) for scale in (6, 5, -24, -25)] == [
            0,
            1,
            1,
            1,
        ]


def in_float16_alone(output):
    assert output.detach().numpy().size == 1  # which has no bfloat16
    return output


REFUSED = {
    "all 16-bit gradients are exactly 0": lambda model: model(ONES).float() * 0.0,
    "the gradients are not finite in bfloat16": lambda model: (
        (model(ONES) * 0.0).abs().sqrt()
    ),
    "no backward makes a 16-bit gradient": lambda model: model.weight * 2.0,
    "no parameter gets a gradient": lambda model: (
        torch.ones(1, requires_grad=True) * 1.0
    ),
    "float16 tensors outside autocast": lambda model: model(ONES).half() * 2.0,
    "not in bfloat16, .*: TypeError: .* BFloat16": lambda model: in_float16_alone(
        model(ONES)
    ),
}


class TestRefused:
    @pytest.mark.parametrize("words", REFUSED)
    def test_training_whose_loss_scale_cannot_be_found_is_refused(self, words):
        model = nn.Linear(1, 1)
        with pytest.raises(LossScaleError, match=words):
            predict_float16(of(model, loss=lambda: REFUSED[words](model)), ONE)

    @pytest.mark.parametrize("factors", [(math.inf, 1.0), (1.0, math.inf)])
    def test_loss_that_is_not_finite_is_refused(self, factors):
        with pytest.raises(
            LossScaleError, match=r"^the loss is not finite, although bfloat16"
        ):
            predict_float16(scaled(*factors), ONE)

    @pytest.mark.parametrize("cast", [torch.bfloat16, None])
    def test_forward_without_float16_autocast_is_refused(self, cast):
        with pytest.raises(
            LossScaleError, match=r"no forward runs under float16 autocast: write"
        ):
            predict_float16(scaled(1.0, cast=cast), ONE)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_trained_parameters_in_16_bits_are_refused(self, dtype):
        (plain,) = scaled(1.0)
        half = nn.Linear(1, 1).to(dtype).requires_grad_(requires_grad=False)
        plain.models = [*plain.models, half]
        assert predict_float16([plain], ONE).total.largest == 1
        half.requires_grad_(requires_grad=True)
        with pytest.raises(
            LossScaleError, match=r"are b?float16, .*write torch\.autocast\(device"
        ):
            predict_float16([plain], ONE)

    def test_error_that_float16_raises_too_is_the_trials_own(self):
        def loss():
            raise KeyError("its own")

        with pytest.raises(KeyError, match="its own"):
            predict_float16(of(nn.Linear(1, 1), loss=loss), ONE)
