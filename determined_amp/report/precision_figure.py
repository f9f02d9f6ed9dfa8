"""The figure of a comparison: speed, and difference of the metric."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.amp.settings import Precision
from determined_amp.report.comparison import Comparison
from determined_amp.report.page import AMBER, BLUE, GREEN, INK, MUTED, STYLE, VERMILION

COLORS = {
    Precision.FP32: INK,
    Precision.TF32: AMBER,
    Precision.AMP_FP16: VERMILION,
    Precision.AMP_BF16: BLUE,
}
_SIZE = (10.0, 4.2)
_COLUMN_WIDTH = 0.6


def draw_comparison(comparison: Comparison) -> Figure:
    """Draw both panels; a panel says if something was not measured."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_speeds(left, comparison)
        _draw_differences(right, comparison)
        figure.suptitle(comparison.setting, x=0.01, ha="left", fontsize=9.0, color=INK)
        return figure


def _draw_speeds(axes: Axes, comparison: Comparison) -> None:
    """Draw a dot per run, a column up to their median, and above it the ratio to the
    baseline.
    """
    for place, same in enumerate(comparison.precisions):
        speed = same.speed
        if speed is None:
            axes.text(
                place, 0.0, "not\nmeasured", ha="center", va="bottom", color=MUTED
            )
            continue
        color = COLORS[same.precision]
        axes.bar(
            place, speed.median, _COLUMN_WIDTH, color=color, alpha=0.25, linewidth=0
        )
        values = [run.speed.median for run in same.runs if run.speed]
        # Side by side, because equal speeds would hide each other.
        left = place - _COLUMN_WIDTH / 2
        places = np.linspace(left, left + _COLUMN_WIDTH, len(values) + 2)[1:-1]
        axes.plot(places, values, "o", color=color, markersize=4)
        label = comparison.speed_label(same.precision, "baseline")
        at = (place, speed.high)
        axes.annotate(
            label, at, (0, 6), textcoords="offset points", ha="center", va="bottom"
        )
    _name_places(axes, [same.name for same in comparison.precisions])
    axes.set_ylim(bottom=0)
    axes.set_title("Samples per second (more is better)")


def _draw_differences(axes: Axes, comparison: Comparison) -> None:
    """Draw the differences of the metric with their 95 % intervals, and the margin as a
    band.
    """
    margin = comparison.margin
    axes.axhspan(-margin, margin, color=GREEN, alpha=0.14, linewidth=0)
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    names = []
    for place, pair in enumerate(comparison.pairs):
        change = pair.metric
        length = change.high - change.mean
        color = COLORS[pair.precision]
        axes.errorbar(place, change.mean, length, color=color, marker="o", capsize=5)
        against = pair.against.value
        verdict = change.judgement.value
        names.append(f"{pair.precision.value}\n- {against}:\n{verdict}")
    _name_places(axes, names)
    axes.set_title(f"Difference of {comparison.metric}")
    axes.set_ylabel(f"band: margin of {margin:.2g}")
    if not names:
        text = "no other precision has a finished run"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=MUTED)


def _name_places(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, max(len(names), 1) - 0.4)
    axes.margins(y=0.15)
