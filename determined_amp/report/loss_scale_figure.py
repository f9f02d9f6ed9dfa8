"""The figure of a loss-scale report: what the finder predicts, and what the trials
measured.

Lines are predicted and dots are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.finder.found_scale import FoundScale
from determined_amp.finder.scale_finding import ScaleFinding
from determined_amp.finder.scale_score import DEFAULT_LOG2
from determined_amp.report import Runs
from determined_amp.report.page import BLUE, GREEN, INK, MUTED, PAPER, STYLE, VERMILION
from determined_amp.search.search_folder import Search

_WIDTH = 10.0
_PANEL_HEIGHT = 2.9

# How far the axis goes beyond the safe range, and log2 of a scale beyond the range of
# float32.
_MARGIN_BITS = 4
_FAR = 200

# A measured number on a predicted line.
_DOT = {
    "marker": "o",
    "markersize": 4.5,
    "markeredgecolor": PAPER,
    "markeredgewidth": 0.6,
}


def draw_loss_scale(predicted: FoundScale | None, search: Search) -> Figure:
    """Draw what the finder predicts and a search measured; a panel without data is left
    out.
    """
    finding = predicted.finding if predicted else None
    ranked = search.ranked()
    with matplotlib.rc_context(STYLE):
        count = 2 if ranked else 1
        figure = Figure(figsize=(_WIDTH, count * _PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
        panels[0].set_xlim(*_limits(finding, search.runs))
        _draw_shares(panels[0], finding, search.runs)
        if ranked:
            _draw_metric(panels[1], search, ranked)
        if finding is not None:
            for axes in panels:
                _mark_scales(axes, finding)
        panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        panels[-1].set_xlabel("log₂ of the initial loss scale")
        return figure


def _limits(finding: ScaleFinding | None, runs: Runs) -> tuple[float, float]:
    scales = [run.scale_log2 for run in runs]
    if finding is not None:
        scales += [
            finding.low_log2 - _MARGIN_BITS,
            finding.top_log2 + _MARGIN_BITS,
            DEFAULT_LOG2,
        ]
    return min(scales) - 1, max(scales) + 1


def _power(log2: float) -> str:
    return f"$2^{{{log2:g}}}$"


def _mark_scales(axes: Axes, finding: ScaleFinding) -> None:
    """Mark the range, overflow, choice and PyTorch's default along an axis of log2
    scales.
    """
    low = finding.low_log2
    top = finding.top_log2
    choice = finding.choice_log2
    if low <= top:
        safe = f"safe range, {_power(low)} to {_power(top)}"
        axes.axvspan(low, top, color=GREEN, alpha=0.10, linewidth=0, label=safe)
    axes.axvspan(
        top + 1, _FAR, color=VERMILION, alpha=0.12, linewidth=0, label="overflow"
    )
    default = f"PyTorch's default, {_power(DEFAULT_LOG2)}"
    axes.axvline(
        DEFAULT_LOG2, color=MUTED, linewidth=1.0, linestyle="--", label=default
    )
    if choice is not None:
        chosen = f"choice, {_power(choice)}"
        axes.axvline(choice, color=GREEN, linewidth=1.8, zorder=1, label=chosen)


def _draw_shares(axes: Axes, finding: ScaleFinding | None, runs: Runs) -> None:
    """Draw the shares of 16-bit gradients that float16 flushes to 0 (by norm) and that
    overflow.
    """
    flushed = []
    overflowed = []
    for run in runs:
        if run.overflow:
            overflowed.append((run.scale_log2, 0.94))
        elif "flushed_share" in run.metrics:
            flushed.append((run.scale_log2, run.metrics["flushed_share"]))
    if finding is not None:
        scales = [shares.scale_log2 for shares in finding.predicted]
        lost = [shares.flushed_share for shares in finding.predicted]
        over = [shares.overflow_share for shares in finding.predicted]
        axes.plot(
            scales, lost, color=BLUE, linewidth=1.6, label="flushed to 0, predicted"
        )
        axes.plot(
            scales, over, color=VERMILION, linewidth=1.6, label="overflow, predicted"
        )
        overflowed += [
            (tried.scale_log2, 0.94) for tried in finding.measured if tried.overflow
        ]
    _dots(axes, flushed, label="flushed to 0, trials", color=BLUE, **_DOT)
    cross = {"marker": "x", "markersize": 5, "transform": axes.get_xaxis_transform()}
    measured = "overflow, measured (a step is skipped)"
    _dots(axes, overflowed, label=measured, color=VERMILION, **cross)
    axes.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
    axes.set_yticks([0.0, 1e-4, 1e-2, 1.0], ["0 %", "0.01 %", "1 %", "100 %"])
    axes.minorticks_off()
    axes.set_ylim(-2e-5, 2.5)
    axes.set_ylabel("share of gradient values")
    axes.set_title("Gradients that float16 loses")


def _draw_metric(axes: Axes, search: Search, ranked: Runs) -> None:
    """Draw the searcher's metric by scale, and mark the best trial."""
    points = [(run.scale_log2, search.value(run) or 0.0) for run in ranked]
    best = points[0]
    _dots(axes, points, label="measured", color=BLUE, **_DOT)
    axes.plot(*best, "o", color=INK, markersize=9, markerfacecolor="none")
    label = f"best {_power(best[0])}"
    in_points = "offset points"
    axes.annotate(
        label, best, (0, 13), textcoords=in_points, ha="center", backgroundcolor=PAPER
    )
    words = search.metric.replace("_", " ")
    axes.set_ylabel(words)
    others = ", ".join(search.also_searched)
    differ = f" (differ also in {others})" if others else ""
    axes.set_title(f"{words.capitalize()}{differ}")


def _dots(axes: Axes, points: Sequence[tuple[float, float]], **style: Any) -> None:
    """Draw these points without a line; nothing, and nothing in the legend, without
    points.
    """
    if points:
        axes.plot(*zip(*points, strict=True), linestyle="none", **style)
