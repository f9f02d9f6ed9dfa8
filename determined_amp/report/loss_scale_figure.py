"""The figure of a loss-scale report: panels one below the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.finder.advice import FoundScale
from determined_amp.finder.verdict import DEFAULT_LOG2, Finding
from determined_amp.report import loss_scale_panels as panels
from determined_amp.report.loss_scale_panels import Point
from determined_amp.report.page import STYLE
from determined_amp.runs.run import Run
from determined_amp.search.search_folder import Search

_WIDTH = 9.0
_MARGIN_BITS = 4


class _Panel(NamedTuple):
    """A panel of the figure; its height is in inches."""

    height: float
    draw: Callable[[Axes], None]
    is_over_scales: bool = True


def draw(prediction: FoundScale | None, search: Search | None) -> Figure:
    """Draw prediction and observations of one experiment; panels without data are left out.

    Args:
        prediction: The prediction of the finder.
        search: The runs of a search.
    """
    finding = prediction.finding if prediction else None
    with matplotlib.rc_context(STYLE):
        drawn = list(_panels(prediction, search))
        heights = [panel.height for panel in drawn]
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        axes = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
        limits = _limits(finding, search.runs if search else ())
        for panel, ax in zip(drawn, axes, strict=True):
            panel.draw(ax)
            if panel.is_over_scales:
                if finding is not None:
                    panels.mark_scales(ax, finding, label=ax is axes[0])
                ax.set_xlim(*limits)
        over_scales = [ax for panel, ax in zip(drawn, axes, strict=True) if panel.is_over_scales]
        if over_scales:
            over_scales[-1].set_xlabel("log₂ of the initial loss scale")
        return figure


def _panels(prediction: FoundScale | None, search: Search | None) -> Iterator[_Panel]:
    finding = prediction.finding if prediction else None
    runs = search.runs if search else ()
    flushed = [
        Point(run.scale_log2, run.metrics["flushed_share"])
        for run in runs
        if "flushed_share" in run.metrics and not run.overflow
    ]
    overflowed = [run.scale_log2 for run in runs if run.overflow]
    if finding is not None or flushed or overflowed:
        yield _Panel(2.7, lambda axes: panels.shares(axes, finding, flushed, overflowed))
    points = [] if search is None else points_of(search)
    if search is not None and points:
        yield _Panel(2.3, partial(_draw_metric, prediction, search, points))
    skips = [
        Point(run.scale_log2, run.skipped_steps) for run in runs if run.skipped_steps is not None
    ]
    if skips:
        yield _Panel(1.2, lambda axes: panels.skips(axes, skips, finding))
    if finding is not None:
        count = sum(bool(module.values_by_log2) for module in finding.modules)
        draw_modules = partial(panels.modules, finding=finding)
        yield _Panel(min(1.1 + 0.2 * count, 5.5), draw_modules, is_over_scales=False)


def _draw_metric(
    prediction: FoundScale | None, search: Search, points: Sequence[Point], axes: Axes
) -> None:
    alone = not search.also_searched
    title = search.metric.replace("_", " ").capitalize()
    if search.metric == "loss_scale_score":
        title += ": log₂(1 + optimizer steps lost)"
        if prediction is not None:
            panels.predicted_scores(axes, prediction, _limits(prediction.finding, search.runs))
            title += " (line: predicted; dots: measured)"
    # All scored trials have the same seed, so there is no spread over seeds.
    seeds = alone and not any(run.is_scored for run in search.runs)
    window = prediction.finding if prediction else None
    panels.metric(axes, points, search.metric, window, band=seeds)
    panels.mark_best(axes, points[0])
    axes.set_title(
        title if alone else f"{title} (differ also in {', '.join(search.also_searched)})"
    )


def points_of(search: Search) -> list[Point]:
    """The searcher's metric of every trial that reported it, best first."""
    longest = max(run.batches for run in search.runs)
    return [
        Point(
            run.scale_log2,
            run.metrics[search.metric],
            None if run.is_scored else run.seed,
            run.batches == longest,
        )
        for run in search.ranked()
    ]


def _limits(finding: Finding | None, rows: Sequence[Run]) -> tuple[float, float]:
    scales = [run.scale_log2 for run in rows]
    if finding is not None:
        scales += [finding.low_log2 - _MARGIN_BITS, finding.top_log2 + _MARGIN_BITS]
        scales += [DEFAULT_LOG2, *(one.scale_log2 for one in finding.verified)]
    return min(scales) - 1, max(scales) + 1
