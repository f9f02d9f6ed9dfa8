"""The figures show the numbers they are given, each where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.report.loss_scale_figure import draw_loss_scale
from determined_amp.report.page import as_png
from determined_amp.report.precision_figure import draw_comparison
from determined_amp.runs.run import Run
from tests.precisions import CPU, LOST, comparison_of, run, seeds
from tests.reporting import Rows, found_scale, observed, scored

SCORES: Rows = [(float(scale), None, scored(scale), {}) for scale in (-8, 0, 16, 18, 19, 24)]


def panel(figure: Figure, name: str) -> Axes:
    """The panel with this label, or with a title that begins so."""
    titles = [(ax.get_ylabel(), ax.get_title(loc="left"), ax) for ax in figure.axes]
    (result,) = [ax for label, title, ax in titles if label == name or title.startswith(name)]
    return result


def numbers(values: Any) -> list[float]:
    return [float(number) for number in values]


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    """The x and the y of the line of that label."""
    (result,) = [drawn for drawn in axes.get_lines() if drawn.get_label() == label]
    return numbers(result.get_xdata()), numbers(result.get_ydata())


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


class TestShares:
    def test_lines_are_predicted_and_dots_measured(self) -> None:
        figure = draw_loss_scale(found_scale(low=-6, top=18), observed(SCORES, "loss_scale_score"))
        axes = panel(figure, "share of gradient values")
        scales, flushed = line(axes, "flushed to 0, predicted")
        shares = dict(zip(scales, flushed, strict=True))
        assert (shares[-7], shares[-6]) == (0.5, 0.0)
        scales, overflowed = line(axes, "overflow, predicted")
        assert next(s for s, o in zip(scales, overflowed, strict=True) if o) == 19
        dots = zip(*line(axes, "flushed to 0, trials"), strict=True)
        assert sorted(dots) == [(-8, 0.25), (0, 0), (16, 0), (18, 0)]
        crosses, _ = line(axes, "overflow, measured (a step is skipped)")
        assert crosses == [19, 24]


def test_metric_of_a_search_has_a_dot_per_trial_and_names_the_best() -> None:
    figure = draw_loss_scale(found_scale(), observed(SCORES, "loss_scale_score"))
    axes = panel(figure, "loss scale score")
    assert dict(zip(*line(axes, "measured"), strict=True)) == {
        scale: metrics["loss_scale_score"] for scale, _, metrics, _ in SCORES
    }
    assert texts(axes) == ["best $2^{16}$"]


def compared() -> Figure:
    """Three seeds in fp32, and others in amp_bf16 at twice the speed."""
    base = seeds("fp32", (0.90, 0.91, 0.92), speed=1000.0, memory=800.0)
    return draw_comparison(
        comparison_of(*base, *seeds("amp_bf16", (0.90, 0.90, 0.92), speed=2000.0))
    )


class TestPrecision:
    def test_columns_have_a_dot_per_run_and_the_ratio(self) -> None:
        figure = compared()
        axes = panel(figure, "Samples per second")
        assert texts(axes) == ["baseline", "2.00x"]
        dots = [sorted(np.asarray(line.get_ydata())) for line in axes.get_lines()]
        assert dots == [[1000.0] * 3, [2000.0] * 3]

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
    assert as_png(draw_comparison(comparison_of(*runs)))
