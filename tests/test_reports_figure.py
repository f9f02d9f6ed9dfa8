"""The figures show the numbers they are given, each where it belongs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.finder.histogram import FLUSH_LOG2, OVERFLOW_LOG2
from determined_amp.finder.scale_finding import ScaleFinding, Verdict
from determined_amp.report import precision_figure
from determined_amp.report.loss_scale_figure import Point, draw, predicted_score, seed_band
from determined_amp.report.page import as_svg
from determined_amp.runs.run import Reports, Run
from tests.precisions import CPU, LOST, findings_of, run, seeds
from tests.reporting import Rows, found_scale, observed, scored

SCORES: Rows = [(float(scale), None, scored(scale), {}) for scale in (-8, 0, 16, 18, 19, 24)]


def panel(figure: Figure, name: str) -> Axes:
    """The panel with this label, or with a title that begins so."""
    titles = [(ax.get_ylabel(), ax.get_title(loc="left"), ax) for ax in figure.axes]
    (result,) = [ax for label, title, ax in titles if label == name or title.startswith(name)]
    return result


def numbers(values: Any) -> list[float]:
    return [float(number) for number in values]


def heights(axes: Axes) -> list[list[float]]:
    """The y of every line."""
    return [numbers(drawn.get_ydata()) for drawn in axes.get_lines()]


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    """The x and the y of the line of that label."""
    (result,) = [drawn for drawn in axes.get_lines() if drawn.get_label() == label]
    return numbers(result.get_xdata()), numbers(result.get_ydata())


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


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
        dots = zip(*line(axes, "flushed to 0, trials"), strict=True)
        assert sorted(dots) == [(-8, 0.25), (0, 0), (16, 0), (18, 0)]
        crosses, _ = line(axes, "overflow, measured (a step is skipped)")
        assert crosses == [19, 24]


class TestMetric:
    def test_band_needs_three_seeds_inside_a_window(self) -> None:
        window = ScaleFinding(0, 18, 17, Verdict.SCALE, (), (), ())
        points = [Point(8.0, 1.0, 1), Point(8.0, 2.0, 2), Point(20.0, 3.0, 3)]
        assert seed_band(points, window) is None
        assert seed_band([*points, Point(9.0, 3.0, 4)], window) == (2.0, 1.0)
        assert seed_band([*points, Point(9.0, 3.0, None)], window) == (2.0, 1.0)
        assert seed_band([*points, Point(9.0, 3.0, 4, whole=False)], window) is None
        assert seed_band([*points, Point(9.0, 3.0, 4)], None) is None

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
        assert texts(axes) == ["best 2¹⁶"]

    def test_predicted_score_is_of_the_scale_after_the_skipped_steps(self) -> None:
        """Without a window: at 2^15, where nothing overflows, half a gradient is lost."""
        result = found_scale(low=20, top=15)
        assert predicted_score(result, 24) == math.log2(1 + 9 + 1000)

    def test_skips_are_counted_and_expected(self) -> None:
        rows: Rows = [
            (scale, 1, {"validation_loss": 1.0}, {"skipped_steps": skipped})
            for scale, skipped in ((8.0, 0.0), (22.0, 4.0))
        ]
        axes = panel(draw(found_scale(top=18), observed(rows)), "skipped steps")
        assert [*zip(*line(axes, "skipped steps"), strict=True)] == [(8, 0), (22, 4)]
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


def compared() -> Figure:
    """Three seeds in fp32, and others in amp_bf16 at twice the speed."""
    base = seeds("fp32", (0.90, 0.91, 0.92), speed=1000.0, memory=800.0)
    return precision_figure.draw(
        findings_of(*base, *seeds("amp_bf16", (0.90, 0.90, 0.92), speed=2000.0))
    )


class TestPrecision:
    def test_columns_have_a_dot_per_run_and_the_ratio(self) -> None:
        figure = compared()
        axes = panel(figure, "Samples per second")
        assert texts(axes) == ["baseline", "2.00x"]
        dots = [sorted(np.asarray(line.get_ydata())) for line in axes.get_lines()]
        assert dots == [[1000.0] * 3, [2000.0] * 3]
        memory = panel(figure, "Peak memory allocated by torch (less is better)")
        assert texts(memory) == ["baseline", "1.25x"]

    def test_metric_of_the_only_validation_has_a_dot_per_run_beside_the_others(self) -> None:
        values = {"fp32": (0.90, 0.91, 0.92), "amp_bf16": (0.90, 0.90, 0.92)}
        runs = [run for precision, its in values.items() for run in seeds(precision, its)]
        ends = [
            dataclasses.replace(run, reports=Reports([("validation", run.reports.validations[-1])]))
            for run in runs
        ]
        axes = panel(precision_figure.draw(findings_of(*ends)), "validation_accuracy")
        assert heights(axes) == [list(its) for its in values.values()]
        places = [x for line in axes.get_lines() for x in numbers(line.get_xdata())]
        assert len(set(places)) == len(runs)

    def test_difference_has_its_interval_over_the_margin(self) -> None:
        axes = panel(compared(), "Difference")
        (container,) = axes.containers
        bars: Any = container.get_children()[-1]
        (bar,) = bars.get_segments()
        # Differences 0, -0.01 and 0: mean -0.0033, deviation 0.0058.
        middle, half = -0.01 / 3, 4.302653 * 0.0057735 / 3**0.5
        assert sorted(bar[:, 1]) == pytest.approx([middle - half, middle + half], rel=1e-4)


@pytest.mark.parametrize(
    "runs",
    [
        (run("fp32"), run("amp_bf16")),
        (run("fp32", device=CPU), run("amp_bf16", device=CPU)),
        (run("fp32"), run("amp_fp16", last_batch=60, end=LOST)),
    ],
    ids=["one seed", "a CPU", "a lost precision"],
)
def test_comparison_that_lacks_a_number_is_drawn(runs: Sequence[Run]) -> None:
    assert as_svg(precision_figure.draw(findings_of(*runs))).startswith("<svg")
