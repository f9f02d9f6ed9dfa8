"""`finder.verdict`: what predictions and passes mean, with both of them made by hand.

float16 flushes 2^-25 to 0 and rounds 2^16 to infinity: for gradients from 2^a to 2^b the scales
from 2^(-24 - a) to 2^(15 - b) are safe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from determined_amp.amp.origin import OUTSIDE, WHOLE_MODEL
from determined_amp.finder import verdict
from determined_amp.finder.passes import Observation, Prediction
from determined_amp.finder.verdict import (
    Finding,
    Verdict,
    _judge,
    _module,
    choice_of,
    find,
)
from tests.loss_scale import fewest_islands, prediction_of

CONTEXT: Any = object()
BATCHES: Any = object()


def found(
    monkeypatch: pytest.MonkeyPatch,
    prediction: Prediction,
    overflows: Callable[[float], bool],
    *,
    loss_is_finite: bool = True,
    sweep: bool = False,
) -> Finding:
    """The finding where float16 overflows at these scales."""

    def observe(context: Any, batches: Any, scale_log2: float, given: Prediction) -> Observation:
        assert (context, batches, given) == (CONTEXT, BATCHES, prediction)
        finite = loss_is_finite and scale_log2 == 0
        return Observation(scale_log2, finite, overflows(scale_log2), 0.0, 0.0)

    def answers(result: Any) -> Callable[..., Any]:
        """A pass of this context and these batches, whose answer is known."""

        def of(context: Any, batches: Any, *others: Any) -> Any:
            assert (context, batches) == (CONTEXT, BATCHES)
            return result

        return of

    for name, result in (("predict", prediction), ("cause_of", "the cause"), ("_help", True)):
        monkeypatch.setattr(verdict, name, answers(result))
    monkeypatch.setattr(verdict, "observe", observe)
    return find(CONTEXT, BATCHES, sweep=sweep)


class TestFind:
    def test_finder_chooses_six_bits_below_the_largest_scale(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        finding = found(monkeypatch, prediction_of({"a": {3: 1}}), lambda scale: scale > 12)
        assert (finding.low_log2, finding.top_log2, finding.choice_log2) == (-27, 12, 6)
        assert finding.answer_log2 == 6
        assert finding.window_bits == 39
        assert [seen.scale_log2 for seen in finding.verified] == [13, 12, 6]
        assert finding.verdict is Verdict.SCALE
        assert (finding.islands, finding.cause) == ((), "")
        assert finding.first_overflow_log2 == 13
        assert [finding.at(scale).overflow_share for scale in (12, 13)] == [0, 1]
        assert [finding.at(scale).flushed_share for scale in (-28, -27)] == [1, 0]

    @pytest.mark.parametrize(
        ("top", "first", "last", "step"), [(12, -31, 20, 3), (126, -31, 130, 7)]
    )
    def test_sweep_measures_every_shown_scale_once_and_the_choice_last(
        self, top: int, first: int, last: int, step: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From four powers of two below the window to four above it, in 24 rows and a few more."""
        prediction = prediction_of({"a": {3: 1}})
        finding = found(monkeypatch, prediction, lambda scale: scale > top, sweep=True)
        measured = [int(seen.scale_log2) for seen in finding.verified]
        assert measured[-1] == finding.choice_log2
        rows, shown = {*range(first, last + 1, step)}, finding.shown_scales()
        assert sorted(measured) == [scale for scale in shown if scale <= 127]
        assert rows | {16, -27, top} < {*shown}
        assert (shown[0], shown[-1]) == (min(rows), max(rows))
        inside = [scale in finding for scale in (-28, -27, top, top + 1)]
        assert inside == [False, True, True, False]
        predicted = [shares.scale_log2 for shares in finding.predicted]
        assert (predicted[0], predicted[-1]) == (first, max(48, last))
        assert predicted == [*range(predicted[0], predicted[-1] + 1)]
        assert finding.at(-1000) is finding.predicted[0]
        assert finding.at(1000) is finding.predicted[-1]

    @pytest.mark.parametrize(("faintest", "choice"), [(-36, 12), (-35, 11)])
    def test_finder_chooses_the_largest_where_no_other_is_safe(
        self, faintest: int, choice: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prediction = prediction_of({"loud": {3: 1}, "faint": {faintest: 1}})
        finding = found(monkeypatch, prediction, lambda scale: scale > 12)
        assert (finding.low_log2, finding.top_log2) == (-24 - faintest, 12)
        assert finding.choice_log2 == choice

    def test_finder_names_islands_where_no_scale_is_safe(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prediction = prediction_of({"loud": {10: 1}, **{name: {-31: 1} for name in "abc"}})
        finding = found(monkeypatch, prediction, lambda scale: scale > 5)
        assert (finding.verdict, finding.islands) == (Verdict.ISLANDS, ("loud",))
        assert (finding.low_log2, finding.top_log2, finding.choice_log2) == (7, 5, 4)
        assert finding.answer_log2 is None

    def test_finder_goes_down_to_what_float16_bears(self, monkeypatch: pytest.MonkeyPatch) -> None:
        finding = found(monkeypatch, prediction_of({"a": {3: 1}}), lambda scale: scale > 8)
        assert (finding.top_log2, finding.choice_log2) == (8, 2)
        assert [seen.scale_log2 for seen in finding.verified] == [13, 12, 11, 10, 9, 8, 2]

    @pytest.mark.parametrize("top", [12, 13, 17, 40, 126, 127])
    def test_top_is_measured_where_it_is_above_the_prediction(
        self, top: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What would overflow is masked on its way to the parameters."""
        finding = found(monkeypatch, prediction_of({"a": {3: 1}}), lambda scale: scale > top)
        assert (finding.low_log2, finding.top_log2) == (-27, top)
        assert finding.choice_log2 == (16 if top >= 16 + 6 else top - 6)
        scales = [seen.scale_log2 for seen in finding.verified]
        assert len(scales) == len({*scales}) < 16

    def test_finder_says_that_the_default_is_fine_where_it_is_safe(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kernel that adds up in float16 may still overflow there."""
        loud = prediction_of({"a": {-7: 1}})
        for edge, expected, choice in (
            (22, Verdict.DEFAULT, 16),
            (20, Verdict.DEFAULT, 14),
            (15, Verdict.SCALE, 9),
        ):
            finding = found(monkeypatch, loud, lambda scale, edge=edge: scale > edge)  # type: ignore[misc]
            assert (finding.verdict, finding.choice_log2) == (expected, choice)
            assert finding.top_log2 == edge
            assert finding.verified[-1].scale_log2 == finding.choice_log2

    @pytest.mark.parametrize("bits", [24, 25])
    def test_finder_gives_up_after_24_bits(
        self, bits: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        finding = found(monkeypatch, prediction_of({"a": {3: 1}}), lambda scale: scale > 12 - bits)
        if bits == 24:
            assert len(finding.verified) == 1 + 25 + 1
            assert (finding.verdict, finding.choice_log2) == (Verdict.SCALE, 12 - 24 - 6)
        else:
            assert len(finding.verified) == 1 + 25
            assert (finding.verdict, finding.choice_log2) == (Verdict.FORWARD_OVERFLOW, None)
            assert finding.cause == "the cause"

    def test_finder_gives_up_at_once_where_the_loss_overflows_without_a_scale(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prediction = prediction_of({"a": {3: 1}})
        finding = found(monkeypatch, prediction, lambda scale: True, loss_is_finite=False)
        assert (finding.verdict, len(finding.verified)) == (Verdict.FORWARD_OVERFLOW, 2)
        assert (finding.low_log2, finding.top_log2, finding.choice_log2) == (-27, 12, None)


@pytest.mark.parametrize(
    ("low", "top", "expected", "choice"),
    [
        (16, 16, Verdict.DEFAULT, 16),
        (-3, 22, Verdict.DEFAULT, 16),
        (-3, 21, Verdict.DEFAULT, 15),
        (-3, 16, Verdict.DEFAULT, 10),
        (16, 20, Verdict.DEFAULT, 16),
        (17, 20, Verdict.SCALE, 18),
        (10, 15, Verdict.SCALE, 12),
        (10, 11, Verdict.SCALE, 10),
        (10, 10, Verdict.SCALE, 10),
        (17, 16, Verdict.BF16, 15),
    ],
)
def test_verdict_and_choice_are_those_of_the_window(
    low: int, top: int, expected: Verdict, choice: int
) -> None:
    assert _judge(CONTEXT, BATCHES, prediction_of({"a": {0: 1}}), low, top) == (expected, ())
    assert choice_of(low, top) == choice


@pytest.mark.parametrize(
    ("helps", "expected"),
    [
        ({("loud",), ("faint", "c", "b")}, ("loud",)),
        ({("faint", "c", "b")}, ("faint", "c", "b")),
        (set(), ()),
    ],
)
def test_verdict_is_for_the_fewest_islands_that_a_pass_shows_to_help(
    helps: set[tuple[str, ...]], expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    proposed = [("faint", "c", "b"), ("loud",)]
    monkeypatch.setattr(verdict, "_islands", lambda prediction: proposed)
    monkeypatch.setattr(verdict, "_help", lambda context, batches, names: names in helps)
    judged = _judge(CONTEXT, BATCHES, prediction_of({"a": {0: 1}}), 1, 0)
    assert judged == (Verdict.ISLANDS if expected else Verdict.BF16, expected)


class TestIslands:
    @pytest.mark.parametrize(("faintest", "expected"), [(-38, ("loud",)), (-39, ("faint",))])
    def test_leave_a_window_of_one_power_of_two_at_least(
        self, faintest: int, expected: tuple[str, ...]
    ) -> None:
        """Without the loud module, gradients of 2^1 and 2^-38 leave 2^14 alone."""
        modules = {"loud": {4: 1}, "a": {1: 1}, "b": {-20: 1}, "faint": {faintest: 1}}
        assert fewest_islands(prediction_of(modules)) == expected

    @pytest.mark.parametrize(("loud", "quiet"), [(1, 2), (2, 3), (3, 4)])
    def test_islands_are_three_at_most_and_fewer_than_the_others(
        self, loud: int, quiet: int
    ) -> None:
        modules = {f"loud {i}": {30 + i: 1} for i in range(loud)}
        others = {f"quiet {i}": {-30: 1} for i in range(quiet)}
        islands = fewest_islands(prediction_of({**modules, **others}))
        assert set(islands) == set(modules)
        assert islands == tuple(sorted(modules, reverse=True))  # the loudest first
        del others["quiet 0"]
        assert fewest_islands(prediction_of({**modules, **others})) != islands

    def test_islands_of_more_than_three_modules_are_none(self) -> None:
        modules = {f"loud {i}": {30: 1} for i in range(4)}
        others = {f"quiet {i}": {-30: 1} for i in range(9)}
        assert fewest_islands(prediction_of({**modules, **others})) == ()

    def test_begin_with_the_loudest_also_where_that_is_1(self) -> None:
        modules = {"one": {0: 1}, "loud": {1: 1}, **{name: {-39: 1} for name in "abcde"}}
        assert fewest_islands(prediction_of(modules)) == ("loud",)

    def test_islands_are_the_fewest(self) -> None:
        """Two loud ones, or one faint one."""
        modules = {"loud": {20: 1}, "louder": {21: 1}, "faint": {-30: 1}}
        others = {name: {0: 1} for name in "abcd"}
        assert fewest_islands(prediction_of({**modules, **others})) == ("faint",)

    @pytest.mark.parametrize("name", [OUTSIDE, WHOLE_MODEL])
    def test_islands_are_modules_that_can_be_named(self, name: str) -> None:
        others = {other: {-30: 1} for other in "abcd"}
        assert fewest_islands(prediction_of({name: {30: 1}, **others})) == ()


def finding_of(prediction: Prediction, low: int = 0, top: int = 10) -> Finding:
    modules = tuple(_module(prediction, name) for name in prediction.modules)
    return Finding(low, top, top - 1, Verdict.SCALE, (), (), modules, 0.0)


@pytest.mark.parametrize(("init", "skips"), [(9, 0), (10, 0), (10.5, 1), (11, 1), (16, 6)])
def test_every_bit_above_the_window_is_a_skipped_step(init: float, skips: int) -> None:
    assert finding_of(prediction_of({})).expected_skips(init) == skips


def test_modules_whose_gradients_are_all_zero_are_hidden() -> None:
    prediction = prediction_of({"a": {-127: 3}, "b": {0: 1}, "c": {}})
    assert finding_of(prediction).hidden_modules == ("a", "c")
