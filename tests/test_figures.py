"""The figures show the numbers they are given, each where it belongs.

Each picture is described in a file of tests/pictures, so that a change of it is a
change of words. `python -m tests.test_figures` describes the pictures anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.spines import Spine

from determined_amp.report.page import Panel, as_png, draw_panels
from determined_amp.report.precision_figure import draw_comparison
from tests.precisions import CPU, LOST, comparison_of, run, seeds

# What is told of a part of a picture, of each that has it.
PROPERTIES = (
    "title xlabel xlim xticklabels ylabel ylim yscale yticklabels label text color "
    "facecolor alpha zorder linestyle linewidth marker markersize markerfacecolor "
    "fontsize position horizontalalignment verticalalignment xy width height xydata "
    "segments"
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


def test_panels_have_their_dots() -> None:
    curve = Panel("loss", "batches", [(1, 0.5), (2, 0.25)])
    dots = Panel("accuracy", "learning_rate", [(0.1, 0.9)], line="")
    axes, others = draw_panels([curve, dots]).axes
    assert (axes.get_title(loc="left"), axes.get_xlabel()) == ("loss", "batches")
    (drawn,) = axes.get_lines()
    assert numbers(drawn.get_xdata()) == [1.0, 2.0]
    assert numbers(drawn.get_ydata()) == [0.5, 0.25]
    assert [each.get_linestyle() for each in others.get_lines()] == ["None"]


def compared() -> Figure:
    """Three seeds in fp32, and others in amp_bf16 at twice the speed."""
    base = seeds("fp32", (0.90, 0.91, 0.92), speed=1000.0, memory=800.0)
    return draw_comparison(
        comparison_of(*base, *seeds("amp_bf16", (0.90, 0.90, 0.92), speed=2000.0))
    )


def bar_in(axes: Axes) -> tuple[float, list[float]]:
    """The dot of the only change, and the ends of its bar."""
    (container,) = axes.containers
    dot: Any = container.get_children()[0]
    (bars,) = container[2]
    (bar,) = bars.get_segments()
    return float(dot.get_ydata()[0]), sorted(bar[:, 1])


def test_change_of_a_precision_has_its_interval_over_the_margin() -> None:
    """Differences of the accuracy 0, -0.01 and 0: mean -0.0033, deviation 0.0058."""
    middle, half = -0.01 / 3, 4.302653 * 0.0057735 / 3**0.5
    dot, bar = bar_in(panel(compared(), "Difference"))
    assert dot == pytest.approx(middle)
    assert bar == pytest.approx([middle - half, middle + half], rel=1e-4)
    dot, bar = bar_in(panel(compared(), "Times as fast"))
    assert dot == pytest.approx(2.0)
    assert bar == pytest.approx([2.0, 2.0])


def test_comparison_on_a_cpu_with_one_seed_is_drawn() -> None:
    """It has no memory and no interval."""
    runs = [run(precision, device=CPU) for precision in ("fp32", "amp_bf16")]
    assert as_png(draw_comparison(comparison_of(*runs)))


def pictures() -> dict[str, Figure]:
    lost = [run("fp32"), run("amp_fp16", last_batch=60, end=LOST)]
    return {
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
            for name in PROPERTIES.split()
            if known.get(name) is not None
        }
        if not isinstance(part, (Axis, Spine)):
            yield f"{type(part).__name__}: {told}"


def description(name: str) -> Path:
    return Path(__file__).with_name("pictures") / f"{name}.txt"


@pytest.mark.parametrize("name", ["comparison", "lost_precision"])
def test_picture_is_the_one_that_is_described(name: str) -> None:
    assert [*parts_of(pictures()[name])] == description(name).read_text().splitlines()


if __name__ == "__main__":
    for name, figure in pictures().items():
        description(name).write_text("".join(f"{part}\n" for part in parts_of(figure)))
