"""Whole figures: panels one below the other, saved as PNG or as SVG for a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from determined_amp.finder.verdict import DEFAULT_LOG2, Finding
from determined_amp.reports import panels
from determined_amp.reports.panels import BLUE, INK, MUTED, PAPER, Point
from determined_amp.reports.sources import Row, Search

STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "loss scale",
}

_WIDTH = 9.0
_HEIGHTS = {"shares": 2.7, "metric": 2.3, "skips": 1.2}
_MARGIN_BITS = 4


def draw(finding: Finding | None, search: Search | None) -> Figure:
    """Prediction and observation of one experiment; what there is no data for is left out.

    Args:
        finding: What the finder says.
        search: What a search observed.
    """
    with matplotlib.rc_context(STYLE):
        rows = search.rows if search else ()
        found = _Panels(finding, search)
        heights = found.heights()
        figure = Figure(figsize=(_WIDTH, sum(heights.values())), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(
            len(heights), 1, squeeze=False, height_ratios=list(heights.values())
        )[:, 0]
        by_name = dict(zip(heights, axes, strict=True))
        found.draw_into(by_name)
        over_scale = [ax for name, ax in by_name.items() if name != "modules"]
        limits = _limits(finding, rows)
        for i, ax in enumerate(over_scale):
            if finding is not None:
                panels.mark_scales(ax, finding, label=i == 0)
            ax.set_xlim(*limits)
        if over_scale:
            over_scale[-1].set_xlabel("log₂ of the initial loss scale")
        return figure


class _Panels:
    """Which panels there is data for, and what goes into them."""

    def __init__(self, finding: Finding | None, search: Search | None) -> None:
        self._finding = finding
        self._search = search
        rows = search.rows if search else ()
        self._flushed = [
            Point(row.scale_log2, row.metrics["flushed_share"])
            for row in rows
            if "flushed_share" in row.metrics and not row.overflow
        ]
        self._overflowed = [row.scale_log2 for row in rows if row.overflow]
        self._metric = [] if search is None else points_of(search)
        self._skips = [
            Point(row.scale_log2, row.skipped_steps)
            for row in rows
            if row.skipped_steps is not None
        ]

    def heights(self) -> dict[str, float]:
        """In inches, of the panels that are drawn."""
        finding = self._finding
        heights = {}
        if finding is not None or self._flushed or self._overflowed:
            heights["shares"] = _HEIGHTS["shares"]
        if self._metric:
            heights["metric"] = _HEIGHTS["metric"]
        if self._skips:
            heights["skips"] = _HEIGHTS["skips"]
        if finding is not None:
            count = sum(bool(module.values_by_log2) for module in finding.modules)
            heights["modules"] = min(1.1 + 0.2 * count, 5.5)
        return heights

    def draw_into(self, axes: dict[str, Axes]) -> None:
        finding, search = self._finding, self._search
        if "shares" in axes:
            panels.shares(axes["shares"], finding, self._flushed, self._overflowed)
            title = "Gradients that float16 loses (lines: predicted; dots, crosses: measured)"
            axes["shares"].set_title(title, pad=18)
        if search is not None and self._metric:
            alone = not search.also_searched
            # Trials that are scored all have one seed: between them lies the scale alone.
            seeds = alone and not any(row.scored for row in search.rows)
            panels.metric(axes["metric"], self._metric, search.metric, finding, band=seeds)
            panels.mark_best(axes["metric"], self._metric[0])
            others = ", ".join(search.also_searched)
            title = search.metric.replace("_", " ").capitalize()
            axes["metric"].set_title(title if alone else f"{title} (differ also in {others})")
        if "skips" in axes:
            panels.skips(axes["skips"], self._skips, finding)
        if finding is not None:
            panels.modules(axes["modules"], finding)
            axes["modules"].set_title("Gradients of each module in float16", pad=18)


def points_of(search: Search) -> list[Point]:
    """The searcher's metric of every trial that has one."""
    longest = max(row.batches for row in search.rows)
    return [
        Point(row.scale_log2, row.metrics[search.metric], row.seed, row.batches == longest)
        for row in search.ranked()
    ]


def _limits(finding: Finding | None, rows: Sequence[Row]) -> tuple[float, float]:
    scales = [row.scale_log2 for row in rows]
    if finding is not None:
        scales += [finding.low_log2 - _MARGIN_BITS, finding.top_log2 + _MARGIN_BITS]
        scales += [DEFAULT_LOG2, *(seen.scale_log2 for seen in finding.verified)]
    return min(scales) - 1, max(scales) + 1


def save_png(figure: Figure, path: Path) -> None:
    """Write a picture with a background of its own."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=130, facecolor=PAPER, metadata={"Software": None})


def as_svg(figure: Figure) -> str:
    """An SVG element whose ink is that of the page around it.

    The page gives `--ink`, `--muted`, `--paper` and `--blue`.
    """
    written = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    inks = {INK: "--ink", MUTED: "--muted", PAPER: "--paper", BLUE: "--blue"}
    for color, name in inks.items():
        svg = svg.replace(color, f"var({name})")
    return svg[svg.index("<svg") :]
