"""The figures show the numbers they are given, each where it belongs.

Each picture is described in a file of tests/pictures, so that a change of it is a
change of words. `python -m tests.test_reports_figure` describes the pictures anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.spines import Spine

from determined_amp.report.loss_scale_figure import draw_loss_scale
from determined_amp.report.page import as_png
from determined_amp.report.precision_figure import draw_comparison
from determined_amp.runs.run import Run
from tests.precisions import CPU, LOST, comparison_of, run, seeds
from tests.reporting import Rows, found_scale, observed, scored

SCORES: Rows = [
    (float(scale), None, scored(scale), {}) for scale in (-8, 0, 16, 18, 19, 24)
]

# What is told of a part of a picture, of each that has it.
PROPERTIES = (
    *(
        "title",
        "xlabel",
        "xlim",
        "xticklabels",
        "ylabel",
        "ylim",
        "yscale",
        "yticklabels",
    ),
    *(
        "label",
        "text",
        "color",
        "facecolor",
        "alpha",
        "zorder",
        "linestyle",
        "linewidth",
    ),
    *("marker", "markersize", "markerfacecolor", "fontsize", "position"),
    *("horizontalalignment", "verticalalignment", "xy"),
    *("width", "height", "xydata", "segments"),
)


def panel(figure: Figure, name: str) -> Axes:
    """The panel with this label, or with a title that begins so."""
    titles = [(ax.get_ylabel(), ax.get_title(loc="left"), ax) for ax in figure.axes]
    (result,) = [
        ax for label, title, ax in titles if label == name or title.startswith(name)
    ]
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
        figure = draw_loss_scale(
            found_scale(low=-6, top=18), observed(SCORES, "loss_scale_score")
        )
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
        assert sorted(bar[:, 1]) == pytest.approx(
            [middle - half, middle + half], rel=1e-4
        )


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


def pictures() -> dict[str, Figure]:
    searched = observed(SCORES, "loss_scale_score", learning_rate=[0.1] * 3 + [0.2] * 3)
    lost = [run("fp32"), run("amp_fp16", last_batch=60, end=LOST)]
    return {
        "loss_scale": draw_loss_scale(found_scale(low=-6, top=18), searched),
        "comparison": compared(),
        "lost_precision": draw_comparison(comparison_of(*lost)),
    }


def plain(value: Any) -> Any:
    """A property in words and numbers of four digits."""
    if isinstance(value, Artist):
        return getattr(value, "get_text", lambda: "")()
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(each) for each in value]
    return f"{value:.4g}" if isinstance(value, (int, float, np.number)) else str(value)


def parts_of(figure: Figure) -> Iterator[str]:
    """A line of each part: what it is, and what is told of it."""
    shown: list[Artist] = [*figure.texts, *figure.legends]
    for axes in figure.axes:
        shown += [axes, *axes.get_children()]
    for part in shown:
        known = part.properties()
        told = {
            name: plain(known[name])
            for name in PROPERTIES
            if known.get(name) is not None
        }
        if not isinstance(part, (Axis, Spine)):
            yield f"{type(part).__name__}: {told}"


def description(name: str) -> Path:
    return Path(__file__).with_name("pictures") / f"{name}.txt"


@pytest.mark.parametrize("name", ["loss_scale", "comparison", "lost_precision"])
def test_picture_is_the_one_that_is_described(name: str) -> None:
    assert [*parts_of(pictures()[name])] == description(name).read_text().splitlines()


if __name__ == "__main__":
    for name, figure in pictures().items():
        description(name).write_text("".join(f"{part}\n" for part in parts_of(figure)))
