"""The figures show the numbers they are given, each where it belongs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from determined_amp.finder.advice import FoundScale
from determined_amp.finder.histogram import FLUSH_LOG2, OVERFLOW_LOG2
from determined_amp.finder.verdict import Window
from determined_amp.report import page
from determined_amp.report.loss_scale_figure import Point, draw, power, predicted_score, seed_band
from determined_amp.report.page import as_svg
from tests.reporting import Rows, finding, found_scale, observed, scored

SCORES: Rows = [(float(scale), None, scored(scale), {}) for scale in (-8, 0, 16, 18, 19, 24)]


def panel(figure: Figure, ylabel: str) -> Axes:
    (result,) = [ax for ax in figure.axes if ax.get_ylabel() == ylabel]
    return result


def numbers(values: Any) -> list[float]:
    return [float(number) for number in values]


def heights(axes: Axes) -> list[list[float]]:
    """The y of every line."""
    return [numbers(drawn.get_ydata()) for drawn in axes.get_lines()]


def boxes(axes: Axes) -> list[tuple[float, float, float, float]]:
    """Left, right, bottom and top of every shaded area."""
    result = []
    for patch in axes.patches:
        assert isinstance(patch, Rectangle)
        left, bottom = patch.get_xy()
        result.append((left, left + patch.get_width(), bottom, bottom + patch.get_height()))
    return result


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    """The x and the y of the line of that label."""
    (result,) = [drawn for drawn in axes.get_lines() if drawn.get_label() == label]
    return numbers(result.get_xdata()), numbers(result.get_ydata())


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def horizontal(axes: Axes) -> list[float]:
    """Where lines go across."""
    return [y[0] for y in heights(axes) if len(y) == 2 and y[0] == y[1]]


def vertical(axes: Axes) -> set[float]:
    result = (numbers(drawn.get_xdata()) for drawn in axes.get_lines())
    return {x[0] for x in result if len(x) == 2 and x[0] == x[1]}


class TestShares:
    def test_lines_are_predicted_and_dots_measured(self) -> None:
        figure = draw(found_scale(low=-6, top=18), observed(SCORES, "loss_scale_score"))
        axes = panel(figure, "share of gradient values")
        scales, flushed = line(axes, "flushed to 0, predicted")
        assert dict(zip(scales, flushed, strict=True))[-7] == 0.5
        assert dict(zip(scales, flushed, strict=True))[-6] == 0.0
        scales, overflowed = line(axes, "overflow, predicted")
        assert next(s for s, o in zip(scales, overflowed, strict=True) if o) == 19
        # The finder measured one scale itself.
        dots = zip(*line(axes, "flushed to 0, measured"), strict=True)
        assert sorted(dots) == [(-8, 0.25), (0, 0), (16, 0), (17, 0), (18, 0)]
        crosses, _ = line(axes, "overflow, measured (a step is skipped)")
        assert crosses == [19, 24]

    def test_choice_default_and_window_are_marked(self) -> None:
        axes = panel(draw(found_scale(choice=17, low=-6, top=18), None), "share of gradient values")
        assert {16.0, 17.0} <= vertical(axes)
        assert {"choice 2¹⁷", "default 2¹⁶", "safe window 2⁻⁶ to 2¹⁸"} <= set(texts(axes))
        spans = {(left, right) for left, right, _, _ in boxes(axes)}
        assert (-6.0, 18.0) in spans
        assert any(left == 19.0 and right > 100 for left, right in spans)

    def test_choice_that_is_the_default_has_one_label(self) -> None:
        axes = panel(draw(found_scale(choice=16), None), "share of gradient values")
        assert "choice = default 2¹⁶" in texts(axes)
        assert "default 2¹⁶" not in texts(axes)

    def test_no_window_and_no_choice(self) -> None:
        axes = panel(draw(found_scale(None, low=20, top=15), None), "share of gradient values")
        assert "no safe window" in texts(axes)
        assert vertical(axes) == {16.0}


class TestMetric:
    LOSSES: ClassVar[Rows] = [
        *[
            (8.0, seed, {"validation_loss": 1.0 + seed}, {"skipped_steps": 0.0})
            for seed in (1, 2, 3)
        ],
        *[
            (12.0, seed, {"validation_loss": 2.0 + seed}, {"skipped_steps": 0.0})
            for seed in (1, 2, 3)
        ],
        *[(22.0, seed, {"validation_loss": 9.0}, {"skipped_steps": 4.0}) for seed in (1, 2, 3)],
    ]

    def test_each_seed_is_a_thin_line_and_the_band_is_theirs(self) -> None:
        axes = panel(draw(found_scale(), observed(self.LOSSES)), "validation loss")
        lines = heights(axes)
        for seed in (1, 2, 3):
            assert [1.0 + seed, 2.0 + seed, 9.0] in lines
        assert [3.0, 4.0, 9.0] in lines  # their mean
        # The band is of the window alone: means 2.5, 3.5, 4.5 over its two scales.
        assert 3.5 in horizontal(axes)
        bands = [(bottom, top) for _, _, bottom, top in boxes(axes)]
        assert pytest.approx((2.5, 4.5)) in bands

    def test_band_needs_three_seeds_inside_a_window(self) -> None:
        window = Window(0, 18, 17)
        points = [Point(8.0, 1.0, 1), Point(8.0, 2.0, 2), Point(20.0, 3.0, 3)]
        assert seed_band(points, window) is None
        assert seed_band([*points, Point(9.0, 3.0, 4)], window) == (2.0, 1.0)
        assert seed_band([*points, Point(9.0, 3.0, None)], window) == (2.0, 1.0)
        assert seed_band([*points, Point(9.0, 3.0, 4, whole=False)], window) is None
        assert seed_band([*points, Point(9.0, 3.0, 4)], None) is None

    def test_no_band_where_something_else_was_searched_too(self) -> None:
        rates = [0.1 * i for i in range(len(self.LOSSES))]
        axes = panel(
            draw(found_scale(), observed(self.LOSSES, learning_rate=rates)), "validation loss"
        )
        assert 3.5 not in horizontal(axes)
        assert "learning_rate" in axes.get_title(loc="left")

    def test_best_is_ringed(self) -> None:
        axes = panel(draw(None, observed(SCORES, "loss_scale_score")), "loss scale score")
        assert texts(axes) == ["best 2¹⁶"]
        assert axes.get_yscale() == "linear"

    def test_scores_are_dots_on_the_predicted_line(self) -> None:
        """2000 steps to grow, half a gradient lost below 2^-6, a skip for each bit above 2^18."""
        of_one_seed: Rows = [(scale, 3, metrics, {}) for scale, _, metrics, _ in SCORES]
        figure = draw(found_scale(), observed(of_one_seed, "loss_scale_score"))
        axes = panel(figure, "loss scale score")
        predicted = dict(zip(*line(axes, "predicted"), strict=True))
        assert predicted[-7] == predicted[-9] == math.log2(1001)
        assert predicted[-6] == predicted[18] == 0
        assert [predicted[k] for k in (19, 20, 24)] == [1, math.log2(3), math.log2(7)]
        dots = [drawn for drawn in axes.get_lines() if drawn.get_marker() == "o"]
        assert numbers(dots[0].get_ydata())[:3] == [0, 0, 0]
        lines = [
            drawn.get_label() for drawn in axes.get_lines() if len(numbers(drawn.get_xdata())) > 2
        ]
        assert len(lines) == 2  # the predicted one, and the dots
        assert "steps lost) (line: predicted; dots: measured)" in axes.get_title(loc="left")
        assert texts(axes) == ["best 2¹⁶"]

    def test_predicted_score_is_of_the_scale_after_the_skipped_steps(self) -> None:
        """Without a window: at 2^15, where nothing overflows, half a gradient is lost."""
        result = found_scale(low=20, top=15)
        assert predicted_score(result, 24) == math.log2(1 + 9 + 1000)

    def test_skips_are_counted_and_expected(self) -> None:
        axes = panel(draw(found_scale(top=18), observed(self.LOSSES)), "skipped steps")
        scales, skips = line(axes, "skipped steps")
        assert set(zip(scales, skips, strict=True)) == {(8, 0), (12, 0), (22, 4)}
        assert [0] * 11 + [1, 2, 3, 4] in heights(axes)  # 2^8 to 2^22


class TestModules:
    def test_rows_are_in_the_order_of_the_forward_at_the_choice(self) -> None:
        axes = draw(found_scale(choice=17), None).axes[-1]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["body <1>", "head"]
        (mesh,) = axes.collections
        heat: Any = mesh.get_array()
        left = axes.get_xlim()[0]
        cells = {
            (int(row), int(column + left)): float(heat[row, column])
            for row, column in zip(*np.nonzero(~heat.mask), strict=True)
        }
        assert cells == {(0, -5 + 17): 1.0, (1, -3 + 17): 1.0, (1, -20 + 17): 0.5}
        assert {float(FLUSH_LOG2), -14.0, float(OVERFLOW_LOG2)} <= vertical(axes)
        assert "2¹⁷" in axes.get_xlabel()

    def test_only_some_of_many_modules_are_named(self) -> None:
        many: dict[str, Any] = finding()
        (module, *_) = many["modules"]
        many["modules"] = [
            {**module, "name": f"m{i}", "values_by_log2": {str(-i): 1}} for i in range(60)
        ]
        axes = draw(FoundScale.from_json(many, "test"), None).axes[-1]
        named = [label.get_text() for label in axes.get_yticklabels()]
        assert named == [f"m{i}" for i in range(59, -1, -3)]


@pytest.mark.parametrize(
    ("with_finding", "metrics", "training", "expected"),
    [
        (True, None, {}, ["share of gradient values", ""]),
        (False, scored(3), {}, ["share of gradient values", "loss scale score"]),
        (False, {"loss_scale_score": 1.0}, {}, ["loss scale score"]),
        (
            True,
            {"loss_scale_score": 1.0},
            {"skipped_steps": 1.0},
            ["share of gradient values", "loss scale score", "skipped steps", ""],
        ),
    ],
)
def test_panels_without_data_are_left_out(
    with_finding: bool, metrics: dict[str, float] | None, training: Any, expected: Sequence[str]
) -> None:
    search = metrics and observed([(3.0, None, metrics, training)], "loss_scale_score")
    figure = draw(found_scale() if with_finding else None, search or None)
    assert [ax.get_ylabel() for ax in figure.axes] == expected


def test_svg_takes_its_ink_from_the_page() -> None:
    svg = as_svg(draw(found_scale(), observed(SCORES, "loss_scale_score")))
    assert svg.startswith("<svg")
    for color, name in ((page.INK, "--ink"), (page.MUTED, "--muted"), (page.PAPER, "--paper")):
        assert color not in svg
        assert f"var({name})" in svg
    assert "var(--blue)" in svg
    assert page.VERMILION in svg  # negative control: colours are written like that


def test_drawing_needs_no_display_and_leaves_no_state() -> None:
    draw(found_scale(), observed(SCORES, "loss_scale_score"))
    assert "matplotlib.pyplot" not in sys.modules


def test_power_is_written_with_a_superscript() -> None:
    assert [power(k) for k in (16, -8, 0, 17.5)] == ["2¹⁶", "2⁻⁸", "2⁰", "2¹⁷·⁵"]


def test_window_holds_its_ends_and_expects_a_skip_per_bit() -> None:
    window = Window(-6, 18, 17)
    assert -6 in window
    assert 18 in window
    assert 18.5 not in window
    assert -7 not in window
    assert [window.expected_skips(s) for s in (10, 18, 18.5, 19, 24)] == [0, 0, 1, 1, 6]
