"""The figure of a comparison: learning, speed, memory and difference of the metric.

A precision has the same colour, line style and position in every panel.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from statistics import mean

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from determined_amp.amp.metric_names import MetricName
from determined_amp.amp.settings import Precision
from determined_amp.report.page import AMBER, BLUE, GREEN, INK, MUTED, STYLE, VERMILION, dots, note
from determined_amp.report.precision_comparison import (
    Comparison,
    Equivalence,
    Ratio,
    median_speed,
)
from determined_amp.report.precision_findings import Findings
from determined_amp.runs.run import Run

COLORS = {
    Precision.FP32: INK,
    Precision.TF32: AMBER,
    Precision.AMP_FP16: VERMILION,
    Precision.AMP_BF16: BLUE,
}
_DASHES = {
    Precision.FP32: "-",
    Precision.TF32: (0, (6, 2)),
    Precision.AMP_FP16: (0, (4, 1.5, 1, 1.5)),
    Precision.AMP_BF16: (0, (2, 1.2)),
}
_SIZE = (10.0, 7.6)
_MOST_COLUMN_WIDTH = 0.6
_JITTER = 0.32
_HEADROOM = 1.15
_LINE = 150
_MOST_CURVES = 60
_SHORT = {
    Equivalence.EQUAL: "equal",
    Equivalence.DIFFERENT: "different",
    Equivalence.UNKNOWN: "cannot tell",
}


def draw(findings: Findings) -> Figure:
    """Draw all four panels; a panel says if something was not measured."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.subplots(2, 2)
        ratios = {c.precision: c for c in findings.with_baseline}
        _learning(axes[0, 0], findings)
        speeds = {p: c.speed for p, c in ratios.items()}
        _columns(axes[0, 1], findings, median_speed, speeds)
        axes[0, 1].set_title("Samples per second (more is better)")
        _memory(axes[1, 0], findings, {p: c.memory for p, c in ratios.items()})
        _differences(axes[1, 1], findings)
        of = "; ".join(f"{s.name}: {s.seeds_in_words}" for s in findings.summaries)
        title = f"{findings.setting}\n{textwrap.fill(of, _LINE)}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=9.0, color=INK)
        return figure


def _learning(axes: Axes, findings: Findings) -> None:
    """Draw the metric of every validation: a thin line per run, a thick one for their mean."""
    more = "less" if findings.smaller_is_better else "more"
    axes.set_title(f"{findings.metric} ({more} is better)")
    runs = [run for summary in findings.summaries for run in summary.runs]
    if all(len(run.curve(findings.metric)) == 1 for run in runs):  # there is no curve
        _draw_ends(axes, findings)
        return
    for summary in findings.summaries:
        curves = [run.curve(findings.metric) for run in summary.runs]
        color, dashes = COLORS[summary.precision], _DASHES[summary.precision]
        for curve in curves[:_MOST_CURVES]:
            (line,) = axes.plot(*zip(*curve, strict=True), color=color, linewidth=0.6, alpha=0.6)
            if len(curve) == 1:  # a line through one point has no length
                line.set(marker="o", markersize=2.5)
        if curves:
            batches, values = _mean_curve(curves)
            (line,) = axes.plot(batches, values, "o", markersize=3.0, label=summary.name)
            line.set(color=color, linestyle=dashes, linewidth=2.0)
    axes.legend(frameon=False, handlelength=3.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("batches")


def _draw_ends(axes: Axes, findings: Findings) -> None:
    """Draw the metric of the only validation: a dot per run, a line for their mean."""
    for place, summary in enumerate(findings.summaries):
        color = COLORS[summary.precision]
        _draw_side_by_side(axes, place, summary.values, color)
        if summary.mean is not None:
            axes.hlines(summary.mean, place - _JITTER, place + _JITTER, color=color, linewidth=2)
    _name_places(axes, findings)


def _mean_curve(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[float]]:
    """The mean over the runs, at the validations that all of them have."""
    common = set.intersection(*({batches for batches, _ in curve} for curve in curves))
    by_batches = [dict(curve) for curve in curves]
    ordered = sorted(common)
    return ordered, [mean(curve[batches] for curve in by_batches) for batches in ordered]


def _memory(axes: Axes, findings: Findings, ratios: dict[Precision, Ratio | None]) -> None:
    _columns(axes, findings, lambda run: run.last(MetricName.PEAK_MEMORY_MIB), ratios)
    on_gpu = findings.machine.on_gpu
    whose = "allocated by torch (less is better)" if on_gpu else "of the process (not judged)"
    axes.set_title(f"Peak memory {whose}")
    axes.set_ylabel("MiB")


def _columns(
    axes: Axes,
    findings: Findings,
    value: Callable[[Run], float | None],
    ratios: dict[Precision, Ratio | None],
) -> None:
    """Draw a dot per run, a column up to their median, and above it the ratio to the baseline."""
    width = min(_MOST_COLUMN_WIDTH, 0.2 * len(findings.summaries))
    spreads = [summary.spread(value) for summary in findings.summaries]
    for place, (summary, spread) in enumerate(zip(findings.summaries, spreads, strict=True)):
        color = COLORS[summary.precision]
        if spread is None:
            lost = len(summary.failed)
            text = "not\nmeasured" if summary.runs else f"{lost} of {lost}\nfailed"
            axes.text(place, 0.0, text, ha="center", va="bottom", color=MUTED)
            continue
        axes.bar(place, spread.median, width, color=color, alpha=0.25, linewidth=0)
        axes.hlines(spread.median, place - width / 2, place + width / 2, color=color, linewidth=2)
        values = [v for run in summary.runs if (v := value(run)) is not None]
        _draw_side_by_side(axes, place, values, color)
        ratio = ratios.get(summary.precision)
        label = f"{ratio.median:.2f}x" if ratio else ""
        if summary.precision is findings.baseline and any(ratios.values()):
            label = "baseline"
        note(axes, label, (place, spread.high), (0, 6), ha="center", va="bottom")
    _name_places(axes, findings)
    highest = max((s.high for s in spreads if s), default=1.0)
    axes.set_ylim(0, _HEADROOM * highest)


def _draw_side_by_side(axes: Axes, place: int, values: Sequence[float], color: str) -> None:
    step = _JITTER / max(len(values) - 1, 1)
    beside = (place + step * (i - (len(values) - 1) / 2) for i in range(len(values)))
    dots(axes, list(zip(beside, values, strict=True)), color, markersize=4, mew=0)


def _name_places(axes: Axes, findings: Findings) -> None:
    axes.set_xticks(range(len(findings.summaries)), [s.name for s in findings.summaries])
    axes.set_xlim(-0.6, len(findings.summaries) - 0.4)
    axes.tick_params(axis="x", length=0)


def _differences(axes: Axes, findings: Findings) -> None:
    """Draw the differences of the metric with their 95 % intervals, and the margin as a band."""
    compared = findings.comparisons
    margin = findings.margin
    axes.axhspan(-margin, margin, color=GREEN, alpha=0.14, linewidth=0)
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    for place, comparison in enumerate(compared):
        _difference(axes, place, comparison)
    names = [f"{c.precision.value}\n- {c.against.value}:\n{_SHORT[c.verdict]}" for c in compared]
    axes.set_xticks(range(len(compared)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, max(len(compared), 1) - 0.4)
    axes.margins(y=0.15)
    axes.set_ylabel(f"difference of {findings.metric}")
    axes.set_title(f"Difference, 95 % interval; band: margin of {margin:.2g}")
    if not compared:
        text = "no other precision has a finished run"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=MUTED)


def _difference(axes: Axes, place: int, comparison: Comparison) -> None:
    interval, color = comparison.difference, COLORS[comparison.precision]
    known = interval.half_width is not None
    axes.errorbar(
        place,
        interval.mean,
        yerr=interval.half_width if known else None,
        color=color,
        marker="o",
        markersize=6,
        markerfacecolor=color if known else "none",
        capsize=5,
        linewidth=1.6,
    )
    if not known:
        note(axes, "no interval\nof one seed", (place, interval.mean), (9, 0), MUTED, va="center")
