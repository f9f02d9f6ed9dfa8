"""The figure of a loss-scale report: panels one below the other.

In all of them lines are predicted and dots are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter

from determined_amp.finder.found_scale import FoundScale
from determined_amp.finder.histogram import FLUSH_LOG2, OVERFLOW_LOG2
from determined_amp.finder.scale_finding import ModuleGradients, ScaleFinding
from determined_amp.finder.scale_score import DEFAULT_LOG2, FLUSHED_LIMIT, score_of, steps_lost
from determined_amp.report.page import (
    AMBER,
    BLUE,
    GREEN,
    INK,
    MUTED,
    PAPER,
    STYLE,
    VERMILION,
    dots,
    note,
)
from determined_amp.runs.run import SCORE, Run
from determined_amp.search.search_folder import Search

_WIDTH = 9.0
_MARGIN_BITS = 4

# log2 of the smallest normal number of float16.
NORMAL_LOG2 = -14

# log2 of a scale beyond the range of float32.
_FAR = 200
_SUPERSCRIPT = str.maketrans("0123456789-.", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻·")

# How many module names fit.
_MOST_NAMES = 28

# One colour, nearly transparent at first: small shares fade into a light or a dark background.
_HEAT = LinearSegmentedColormap.from_list("heat", [to_rgba(BLUE, 0.1), to_rgba(BLUE)])

# A measured number on a predicted line.
_DOT = {"markersize": 4.5, "markeredgecolor": PAPER, "markeredgewidth": 0.6}


@dataclass(frozen=True)
class Point:
    """One number measured in one training."""

    scale_log2: float  # log2 of the training's initial loss scale
    value: float
    # A line joins the points with the same seed; a point without a seed stands alone.
    seed: int | None = None
    whole: bool = True  # whether the training ran to its end


# A panel: its height in inches, and what draws it.
_Panel = tuple[float, Callable[[Axes], None]]


def draw(prediction: FoundScale | None, search: Search | None) -> Figure:
    """Draw what the finder predicts and a search measured; panels without data are left out."""
    finding = prediction.finding if prediction else None
    with matplotlib.rc_context(STYLE):
        panels = list(_over_scales(prediction, search))
        heights = [height for height, _ in panels]
        if finding is not None:
            count = sum(bool(module.values_by_log2) for module in finding.modules)
            heights.append(min(1.1 + 0.2 * count, 5.5))
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        limits = _limits(finding, search.runs if search else ())
        for (_, draw_panel), ax in zip(panels, axes, strict=False):
            draw_panel(ax)
            if finding is not None:
                _mark_scales(ax, finding, label=ax is axes[0])
            ax.set_xlim(*limits)
        if panels:
            axes[len(panels) - 1].set_xlabel("log₂ of the initial loss scale")
        if finding is not None:
            _draw_modules(axes[-1], finding)
        return figure


def _over_scales(prediction: FoundScale | None, search: Search | None) -> Iterator[_Panel]:
    """The panels over the loss scale, from what was predicted and measured."""
    finding = prediction.finding if prediction else None
    runs = search.runs if search else ()
    flushed = [
        (run.scale_log2, run.metrics["flushed_share"])
        for run in runs
        if "flushed_share" in run.metrics and not run.overflow
    ]
    overflowed = [run.scale_log2 for run in runs if run.overflow]
    if finding is not None or flushed or overflowed:
        yield 2.7, lambda axes: _draw_shares(axes, finding, flushed, overflowed)
    points = [] if search is None else points_of(search)
    if search is not None and points:
        yield 2.3, lambda axes: _draw_metric(axes, prediction, search, points)
    skips = [(r.scale_log2, r.skipped_steps) for r in runs if r.skipped_steps is not None]
    if skips:
        yield 1.2, lambda axes: _draw_skips(axes, skips, finding)


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


def _limits(finding: ScaleFinding | None, rows: Sequence[Run]) -> tuple[float, float]:
    scales = [run.scale_log2 for run in rows]
    if finding is not None:
        scales += [finding.low_log2 - _MARGIN_BITS, finding.top_log2 + _MARGIN_BITS]
        scales += [DEFAULT_LOG2, *(one.scale_log2 for one in finding.measured)]
    return min(scales) - 1, max(scales) + 1


def power(log2: float) -> str:
    """2 to the power `log2`, such as 2¹⁶."""
    return "2" + f"{log2:g}".translate(_SUPERSCRIPT)


def _mark_scales(axes: Axes, window: ScaleFinding, *, label: bool) -> None:
    """Mark the window, overflow, choice and PyTorch's default along an axis of log2 scales."""
    low, top, choice = window.low_log2, window.top_log2, window.choice_log2
    if low <= top:
        axes.axvspan(low, top, color=GREEN, alpha=0.10, linewidth=0, zorder=0)
    axes.axvspan(top + 1, _FAR, color=VERMILION, alpha=0.12, linewidth=0, zorder=0)
    axes.axvline(DEFAULT_LOG2, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1)
    if choice is not None:
        axes.axvline(choice, color=GREEN, linewidth=1.8, zorder=1)
    if not label:
        return
    above = axes.get_xaxis_transform()
    safe = f"safe window {power(low)} to {power(top)}" if low <= top else "no safe window"
    axes.text(top, 1.03, safe, transform=above, color=GREEN, ha="right")
    axes.text(top + 1, 1.03, "overflow", transform=above, color=VERMILION)
    labels = {DEFAULT_LOG2: (0.77, f"default {power(DEFAULT_LOG2)}", MUTED)}
    if choice is not None:
        word = "choice = default" if choice == DEFAULT_LOG2 else "choice"
        labels[choice] = (0.87, f"{word} {power(choice)}", GREEN)
    for scale, (height, text, color) in labels.items():
        place = {"xycoords": above, "ha": "right", "va": "center"}
        note(axes, text, (scale, height), (-4, 0), color=color, **place)


def _draw_shares(
    axes: Axes,
    finding: ScaleFinding | None,
    flushed: Sequence[tuple[float, float]],
    overflowed: Sequence[float],
) -> None:
    """Draw the shares of 16-bit gradients that float16 flushes to 0 (by norm) and that overflow.

    Trials without an overflow give points (log2 of the scale, share), the others only the former.
    """
    if finding is not None:
        scales = [p.scale_log2 for p in finding.predicted]
        lost = [p.flushed_share for p in finding.predicted]
        over = [p.overflow_share for p in finding.predicted]
        axes.plot(scales, lost, color=BLUE, linewidth=1.6, label="flushed to 0, predicted")
        axes.plot(scales, over, color=VERMILION, linewidth=1.6, label="overflow, predicted")
        _name_line(axes, scales, lost, "flushed to 0")
        overflowed = [*overflowed, *(m.scale_log2 for m in finding.measured if m.overflow)]
        axes.axhline(FLUSHED_LIMIT, color=MUTED, linewidth=0.7, linestyle=":")
    dots(axes, flushed, BLUE, "flushed to 0, trials", **_DOT)
    dots(
        axes,
        [(scale, 0.94) for scale in overflowed],
        VERMILION,
        "overflow, measured (a step is skipped)",
        marker="x",
        markersize=5,
        transform=axes.get_xaxis_transform(),
    )
    axes.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
    axes.yaxis.set_major_locator(FixedLocator([0.0, 1e-4, 1e-2, 1.0]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:g} %"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(-2e-5, 2.5)
    axes.set_ylabel("share of gradient values")
    axes.set_title(
        "Gradients that float16 loses (lines: predicted; dots: trials; crosses: measured)", pad=18
    )


def _name_line(axes: Axes, scales: list[int], values: list[float], text: str) -> None:
    """Write the name beside the falling line, at its last point well above the limit."""
    high = [i for i, value in enumerate(values) if value >= 4 * FLUSHED_LIMIT]
    if high:
        i = high[-1]
        axes.annotate(
            text, (scales[i], values[i]), xytext=(6, 4), textcoords="offset points", color=BLUE
        )


def _draw_metric(
    axes: Axes, prediction: FoundScale | None, search: Search, points: Sequence[Point]
) -> None:
    """Draw the searcher's metric by scale: the trials, their spread over seeds, and the best."""
    name, others = search.metric, search.also_searched
    title = name.replace("_", " ").capitalize()
    is_score = name == SCORE
    if is_score:
        title += ": log₂(1 + optimizer steps lost)"
    if is_score and prediction is not None:
        low, high = _limits(prediction.finding, search.runs)
        scales = range(math.ceil(low), math.floor(high) + 1)
        scores = [predicted_score(prediction, scale) for scale in scales]
        axes.plot(scales, scores, color=BLUE, linewidth=1.6, alpha=0.5, label="predicted")
        title += " (line: predicted; dots: measured)"
    _draw_trials(axes, points)
    # There is no spread over the seeds of scored trials, which have the same one.
    is_over_seeds = not others and not any(run.is_scored for run in search.runs)
    band = seed_band(points, prediction.finding) if prediction and is_over_seeds else None
    if band is not None:
        centre, spread = band
        axes.axhspan(centre - spread, centre + spread, color=AMBER, alpha=0.18, linewidth=0)
        axes.axhline(centre, color=AMBER, linewidth=0.8)
    values = [point.value for point in points]
    if min(values) > 0 and max(values) > 10 * min(values) and not is_score:
        axes.set_yscale("log")
    best = (points[0].scale_log2, points[0].value)
    dots(axes, [best], INK, markersize=9, markerfacecolor="none")
    note(axes, f"best {power(best[0])}", best, (0, 13), ha="center")
    axes.set_ylabel(name.replace("_", " "))
    axes.set_title(f"{title} (differ also in {', '.join(others)})" if others else title)


def _draw_trials(axes: Axes, points: Sequence[Point]) -> None:
    """Draw a thin line per seed, a dot per trial, hollow if it was stopped early, and the mean."""
    seeds = _by_seed(points)
    for points_of_seed in seeds.values():
        line = sorted((p.scale_log2, p.value) for p in points_of_seed)
        axes.plot(*zip(*line, strict=True), color=BLUE, linewidth=0.7, alpha=0.5)
    for whole, face in ((True, BLUE), (False, "none")):
        ended = [(p.scale_log2, p.value) for p in points if p.whole is whole]
        dots(axes, ended, BLUE, markersize=3.5, markerfacecolor=face, alpha=0.7)
    if any(len(line) > 1 for line in seeds.values()) and len(seeds) > 1:
        scales = sorted({point.scale_log2 for point in points})
        means = [mean(p.value for p in points if p.scale_log2 == scale) for scale in scales]
        axes.plot(scales, means, color=INK, linewidth=1.6)


def predicted_score(prediction: FoundScale, scale_log2: float) -> float:
    """The score of a scale as the finder predicts it, see `Score`."""
    skipped = prediction.finding.expected_skips(scale_log2)
    share = prediction.finding.at(scale_log2 - skipped).flushed_share
    return score_of(steps_lost(skipped, share, prediction.run.growth_interval))


def _by_seed(points: Sequence[Point]) -> dict[object, list[Point]]:
    lines: dict[object, list[Point]] = {}
    for i, point in enumerate(points):
        lines.setdefault(("alone", i) if point.seed is None else point.seed, []).append(point)
    return lines


def seed_band(points: Sequence[Point], window: ScaleFinding | None) -> tuple[float, float] | None:
    """Mean and standard deviation of the seeds' means inside the safe window.

    None without a window, or with fewer than three seeds in it.
    """
    if window is None:
        return None
    inside = [p for p in points if p.whole and p.scale_log2 in window]
    of_seeds = [mean(p.value for p in line) for line in _by_seed(inside).values()]
    return (mean(of_seeds), stdev(of_seeds)) if len(of_seeds) >= 3 else None


def _draw_skips(
    axes: Axes, skips: Sequence[tuple[float, float]], window: ScaleFinding | None
) -> None:
    """Draw skipped optimizer steps by scale: those expected at the start, and those counted."""
    if window is not None:
        ends = [scale for scale, _ in skips]
        scales = range(math.floor(min(ends)), math.ceil(max(ends)) + 1)
        expected = [window.expected_skips(scale) for scale in scales]
        axes.plot(scales, expected, color=VERMILION, linewidth=1.4)
    dots(axes, skips, VERMILION, "skipped steps", **_DOT)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_ylim(bottom=-0.6)
    axes.set_ylabel("skipped steps")


def _draw_modules(axes: Axes, finding: ScaleFinding) -> None:
    """Draw where each module's gradients lie in float16, at the chosen scale.

    Each row is a module, in the order of the forward. A dark cell holds many of its values.
    """
    scale = finding.choice_log2 or 0
    rows = [m for m in reversed(finding.modules) if m.values_by_log2]
    powers = [q + scale for m in rows for q in m.values_by_log2]
    left, right = min([*powers, FLUSH_LOG2 - 6]), max([*powers, OVERFLOW_LOG2 + 5]) + 1
    heat = np.ma.masked_equal(np.array([_density(m, scale, left, right) for m in rows]), 0.0)
    axes.pcolormesh(
        np.arange(left, right + 1),
        np.arange(len(rows) + 1) - 0.5,
        heat,
        cmap=_HEAT,
        vmin=0.0,
        rasterized=len(rows) > _MOST_NAMES,
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left, right)
    # If not all names fit, only every n-th row is labelled.
    shown = range(0, len(rows), math.ceil(len(rows) / _MOST_NAMES) or 1)
    axes.set_yticks(list(shown), [rows[i].name for i in shown])
    axes.tick_params(axis="y", length=0)
    above = axes.get_xaxis_transform()
    regions = (
        (left, FLUSH_LOG2, VERMILION, "flushed to 0"),
        (FLUSH_LOG2, NORMAL_LOG2, AMBER, "loses bits"),
        (NORMAL_LOG2, OVERFLOW_LOG2, "none", "full precision"),
        (OVERFLOW_LOG2, right, VERMILION, "overflow"),
    )
    for start, end, color, text in regions:
        axes.axvspan(start, end, color=color, alpha=0.10, linewidth=0, zorder=0)
        centre = (start + end) / 2
        ink = GREEN if color == "none" else color
        axes.text(centre, 1.02, text, transform=above, color=ink, ha="center", va="bottom")
    for border in (FLUSH_LOG2, NORMAL_LOG2, OVERFLOW_LOG2):
        axes.axvline(border, color=INK, linewidth=0.8)
    axes.set_xlabel(f"log₂ of |gradient| · {power(scale)}, 16-bit values of the backward")
    axes.set_title("Gradients of each module in float16", pad=18)


def _density(module: ModuleGradients, scale: int, left: int, right: int) -> list[float]:
    most = max(module.values_by_log2.values())
    return [module.values_by_log2.get(power - scale, 0) / most for power in range(left, right)]
