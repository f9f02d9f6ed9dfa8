"""The figure of a comparison: what each precision changes, with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.amp.settings import Precision
from determined_amp.report.change import MIN_RATIO, RATIO_MARGIN, Change
from determined_amp.report.comparison import Comparison
from determined_amp.report.page import AMBER, BLUE, GREEN, INK, MUTED, STYLE, VERMILION

COLORS = {
    Precision.FP32: INK,
    Precision.TF32: AMBER,
    Precision.AMP_FP16: VERMILION,
    Precision.AMP_BF16: BLUE,
}
_SIZE = (10.0, 4.2)

# The two precisions of a pair in words, the colour of the first, and what it changes.
Drawn = Sequence[tuple[str, str, Change | None]]


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw the change of speed and metric in each pair of precisions.

    Dots are means, bars their 95 % intervals; the band is the margin.
    """
    speeds, metrics = [], []
    for pair in comparison.pairs:
        names = f"{pair.precision.value}\n- {pair.against.value}"
        color = COLORS[pair.precision]
        speeds.append((names, color, pair.speed))
        metrics.append((names, color, pair.metric))
    margin = comparison.margin
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_changes(left, speeds, RATIO_MARGIN, math.exp)
        left.set_title("Times as fast")
        left.set_ylabel(f"band: less than {MIN_RATIO - 1:.0%}")
        _draw_changes(right, metrics, margin, float)
        right.set_title(f"Difference of {comparison.metric}")
        right.set_ylabel(f"band: margin of {margin:.2g}")
        figure.suptitle(comparison.setting, x=0.01, ha="left", fontsize=9.0, color=INK)
        return figure


def _draw_changes(
    axes: Axes, drawn: Drawn, margin: float, shown: Callable[[float], float]
) -> None:
    """Draw some changes and their margin, each number as `shown` makes it."""
    axes.axhspan(shown(-margin), shown(margin), color=GREEN, alpha=0.14, linewidth=0)
    axes.axhline(shown(0.0), color=MUTED, linewidth=0.8)
    names = []
    for place, (name, color, change) in enumerate(drawn):
        if change is None:
            names.append(f"{name}:\nnot measured")
            continue
        mean = shown(change.mean)
        bar = [[mean - shown(change.low)], [shown(change.high) - mean]]
        axes.errorbar(place, mean, bar, color=color, marker="o", capsize=5)
        names.append(f"{name}:\n{change.judgement.value}")
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, max(len(names), 1) - 0.4)
    axes.margins(y=0.15)
    if not names:
        text = "no other precision has a finished run"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=MUTED)
