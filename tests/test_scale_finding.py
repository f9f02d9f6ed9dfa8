"""`finder.scale_finding`: what predictions and measurements mean, with both of them
made by hand.

float16 flushes 2^-25 to 0 and rounds 2^16 to infinity: for gradients from 2^a to 2^b
the scales from 2^(-24 - a) to 2^(15 - b) are safe.
"""

from __future__ import annotations

from typing import Any

import pytest

from determined_amp.finder import scale_finding
from determined_amp.finder.prediction import Prediction
from determined_amp.finder.scale_finding import Verdict, find_range
from tests.loss_scale import histogram, prediction_of

REHEARSALS: Any = object()
SLOTS: Any = object()


def found(monkeypatch, prediction, overflows):
    """The finding where float16 overflows at these scales."""

    def answers(answer):
        def of(rehearsals, slots, *others):
            assert (rehearsals, slots) == (REHEARSALS, SLOTS)
            return answer(*others)

        return of

    monkeypatch.setattr(scale_finding, "predict_float16", answers(lambda: prediction))
    monkeypatch.setattr(scale_finding, "cause_of", answers(lambda: "the cause"))
    monkeypatch.setattr(scale_finding, "any_overflow_at", answers(overflows))
    return find_range(REHEARSALS, SLOTS)


def test_shown_scales_reach_from_below_the_range_to_above_it(monkeypatch):
    """Four powers of two on either side; in 24 rows and a few more."""
    finding = found(monkeypatch, prediction_of(ONE), lambda scale: scale > 12)
    shown = [one.scale_log2 for one in finding.scales]
    assert shown == sorted({-27, 12, 13, 16, *range(-31, 21, 3)})


def test_finder_advises_bfloat16_where_no_scale_is_safe(monkeypatch):
    prediction = prediction_of({"loud": {10: 1}, **{name: {-31: 1} for name in "abc"}})
    finding = found(monkeypatch, prediction, lambda scale: scale > 5)
    assert finding.verdict is Verdict.BF16
    assert (finding.low_log2, finding.top_log2, finding.choice_log2) == (7, 5, 4)
    assert finding.answer_log2 is None


# Powers of two of the gradients, the largest scale that works, and what is found there.
ONE, LOUD = {"a": {3: 1}}, {"a": {-7: 1}}


@pytest.mark.parametrize(
    ("modules", "works", "low", "choice", "verdict"),
    [
        (ONE, 12, -27, 6, Verdict.SCALE),  # six bits below
        # No other is safe.
        ({**ONE, "faint": {-36: 1}}, 12, 12, 12, Verdict.SCALE),
        # What would overflow is masked on its way to the parameters.
        (ONE, 13, -27, 7, Verdict.SCALE),
        (ONE, 17, -27, 11, Verdict.DEFAULT),
        (ONE, 126, -27, 16, Verdict.DEFAULT),
        (ONE, 127, -27, 16, Verdict.DEFAULT),
        # A kernel that adds up in float16 may overflow below the prediction.
        (LOUD, 22, -17, 16, Verdict.DEFAULT),
        (LOUD, 15, -17, 9, Verdict.SCALE),
        # Nearer to the low end of a small range; the default is in the second one.
        ({"a": {0: 1}, "faint": {-34: 1}}, 15, 10, 12, Verdict.SCALE),
        ({"a": {-1: 1}, "faint": {-40: 1}}, 16, 16, 16, Verdict.DEFAULT),
        ({"a": {-5: 1}, "faint": {-41: 1}}, 20, 17, 18, Verdict.SCALE),
        (ONE, 12 - 24, -27, -18, Verdict.SCALE),
        # After 24 bits it gives up.
        (ONE, 12 - 25, -27, None, Verdict.FORWARD_OVERFLOW),
    ],
)
def test_range_and_choice_are_those_that_float16_shows(
    modules, works, low, choice, verdict, *, monkeypatch
):
    finding = found(monkeypatch, prediction_of(modules), lambda scale: scale > works)
    assert (finding.low_log2, finding.choice_log2) == (low, choice)
    assert finding.verdict is verdict
    tried = [one for one in finding.scales if one.overflow is not None]
    assert [one.overflow for one in tried] == [one.scale_log2 > works for one in tried]
    assert tried[-1].scale_log2 <= 127
    assert len(tried) <= (2 if works == 12 else 14)
    if choice is None:
        assert (finding.answer_log2, finding.cause) == (None, "the cause")
    else:
        assert (finding.top_log2, finding.range_bits) == (works, works - low)
        recommended = 16 if verdict is Verdict.DEFAULT else choice
        assert (finding.answer_log2, finding.cause) == (recommended, "")


def test_shares_are_those_of_the_prediction(monkeypatch):
    finding = found(monkeypatch, prediction_of(ONE), lambda scale: scale > 12)
    at = {one.scale_log2: one for one in finding.scales}
    assert [at[scale].overflow_share for scale in (12, 13)] == [0, 1]
    assert [at[scale].flushed_share for scale in (-28, -27)] == [1, 0]


def test_modules_whose_gradients_are_all_zero_are_hidden(monkeypatch):
    tensors = prediction_of({"a": {}, "b": {0: 1}}).tensors
    tensors = {
        source: its if its.nonzero else histogram({}, 3)
        for source, its in tensors.items()
    }
    finding = found(monkeypatch, Prediction(tensors), lambda scale: scale > 15)
    assert finding.hidden_modules == ("a",)
