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
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.spines import Spine

from determined_amp.report.loss_scale_figure import draw_loss_scale
from determined_amp.report.page import as_png
from determined_amp.report.precision_figure import draw_comparison
from tests.precisions import CPU, LOST, comparison_of, run, seeds
from tests.reporting import Rows, found_scale, observed, scored

SCORES: Rows = [
    (float(scale), None, scored(scale), {}) for scale in (-8, 0, 16, 18, 19, 24)
]

# What is told of a part of a picture, of each that has it.
PROPERTIES = (
    "title xlabel xlim xticklabels ylabel ylim yscale yticklabels label text color "
    "facecolor alpha zorder linestyle linewidth marker markersize markerfacecolor "
    "fontsize position horizontalalignment verticalalignment xy width height xydata "
    "segments"
)


def compared() -> Figure:
    """Three seeds in fp32, and others in amp_bf16 at twice the speed."""
    base = seeds("fp32", (0.90, 0.91, 0.92), speed=1000.0, memory=800.0)
    return draw_comparison(
        comparison_of(*base, *seeds("amp_bf16", (0.90, 0.90, 0.92), speed=2000.0))
    )


def test_comparison_on_a_cpu_with_one_seed_is_drawn() -> None:
    """It has no memory and no interval."""
    runs = [run(precision, device=CPU) for precision in ("fp32", "amp_bf16")]
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
            for name in PROPERTIES.split()
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
