"""The figure of a loss-scale report: what the finder predicts, and what the trials measured.

Lines are predicted and dots are measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.finder.found_scale import FoundScale
from determined_amp.finder.scale_finding import ScaleFinding
from determined_amp.finder.scale_score import DEFAULT_LOG2, FLUSHED_LIMIT
from determined_amp.report.page import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    PAPER,
    STYLE,
    VERMILION,
    annotate,
    dots,
)
from determined_amp.runs.run import Run
from determined_amp.search.search_folder import Search

_WIDTH, _PANEL_HEIGHT = 10.0, 2.9

# How far the axis goes beyond the window, and log2 of a scale beyond the range of float32.
_MARGIN_BITS = 4
_FAR = 200

# A measured number on a predicted line.
_DOT = {"markersize": 4.5, "markeredgecolor": PAPER, "markeredgewidth": 0.6}


def draw_loss_scale(predicted: FoundScale | None, search: Search | None) -> Figure:
    """Draw what the finder predicts and a search measured; a panel without data is left out."""
    finding = predicted.finding if predicted else None
    runs = search.runs if search else ()
    has_metric = search is not None and bool(search.ranked())
    with matplotlib.rc_context(STYLE):
        count = 1 + has_metric
        figure = Figure(figsize=(_WIDTH, count * _PANEL_HEIGHT), layout="constrained")
        panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
        panels[0].set_xlim(*_limits(finding, runs))
        _draw_shares(panels[0], finding, runs)
        if has_metric and search is not None:
            _draw_metric(panels[1], search)
        if finding is not None:
            for axes in panels:
                _mark_scales(axes, finding)
        panels[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        panels[-1].set_xlabel("log₂ of the initial loss scale")
        return figure


def _limits(finding: ScaleFinding | None, runs: Sequence[Run]) -> tuple[float, float]:
    scales = [run.scale_log2 for run in runs]
    if finding is not None:
        scales += [finding.low_log2 - _MARGIN_BITS, finding.top_log2 + _MARGIN_BITS, DEFAULT_LOG2]
    return min(scales) - 1, max(scales) + 1


def _power(log2: float) -> str:
    return f"$2^{{{log2:g}}}$"


def _mark_scales(axes: Axes, finding: ScaleFinding) -> None:
    """Mark the window, overflow, choice and PyTorch's default along an axis of log2 scales."""
    low, top, choice = finding.low_log2, finding.top_log2, finding.choice_log2
    if low <= top:
        window = f"safe window, {_power(low)} to {_power(top)}"
        axes.axvspan(low, top, color=GREEN, alpha=0.10, linewidth=0, label=window)
    axes.axvspan(top + 1, _FAR, color=VERMILION, alpha=0.12, linewidth=0, label="overflow")
    default = f"PyTorch's default, {_power(DEFAULT_LOG2)}"
    axes.axvline(DEFAULT_LOG2, color=MUTED, linewidth=1.0, linestyle="--", label=default)
    if choice is not None:
        chosen = f"choice, {_power(choice)}"
        axes.axvline(choice, color=GREEN, linewidth=1.8, zorder=1, label=chosen)


def _draw_shares(axes: Axes, finding: ScaleFinding | None, runs: Sequence[Run]) -> None:
    """Draw the shares of 16-bit gradients that float16 flushes to 0 (by norm) and that overflow."""
    flushed = [
        (run.scale_log2, run.metrics["flushed_share"])
        for run in runs
        if "flushed_share" in run.metrics and not run.overflow
    ]
    overflowed = [run.scale_log2 for run in runs if run.overflow]
    if finding is not None:
        scales = [p.scale_log2 for p in finding.predicted]
        lost = [p.flushed_share for p in finding.predicted]
        over = [p.overflow_share for p in finding.predicted]
        axes.plot(scales, lost, color=BLUE, linewidth=1.6, label="flushed to 0, predicted")
        axes.plot(scales, over, color=VERMILION, linewidth=1.6, label="overflow, predicted")
        overflowed += [m.scale_log2 for m in finding.measured if m.overflow]
        axes.axhline(FLUSHED_LIMIT, color=MUTED, linewidth=0.7, linestyle=":")
    dots(axes, flushed, BLUE, "flushed to 0, trials", **_DOT)
    top = {"marker": "x", "markersize": 5, "transform": axes.get_xaxis_transform()}
    crosses = [(scale, 0.94) for scale in overflowed]
    dots(axes, crosses, VERMILION, "overflow, measured (a step is skipped)", **top)
    axes.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
    axes.set_yticks([0.0, 1e-4, 1e-2, 1.0], ["0 %", "0.01 %", "1 %", "100 %"])
    axes.minorticks_off()
    axes.set_ylim(-2e-5, 2.5)
    axes.set_ylabel("share of gradient values")
    axes.set_title("Gradients that float16 loses")


def _draw_metric(axes: Axes, search: Search) -> None:
    """Draw the searcher's metric by scale, and mark the best trial."""
    points = [(run.scale_log2, search.value(run) or 0.0) for run in search.ranked()]
    dots(axes, points, BLUE, "measured", **_DOT)
    dots(axes, points[:1], INK, markersize=9, markerfacecolor="none")
    annotate(axes, f"best {_power(points[0][0])}", points[0], (0, 13), ha="center")
    words, others = search.metric.replace("_", " "), search.also_searched
    axes.set_ylabel(words)
    differ = f" (differ also in {', '.join(others)})" if others else ""
    axes.set_title(f"{words.capitalize()}{differ}")
