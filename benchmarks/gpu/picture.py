"""Draws the picture of `benchmarks.gpu`: ResNet-50's speed and memory by batch size."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.gpu.goals import RECORD, RECORD_DEVICE, by_round
from determined_amp.report.page import BLUE, GREEN, INK, MUTED, STYLE, VERMILION

COLOURS = {"fp32": MUTED, "tf32": GREEN, "amp_fp16": VERMILION, "amp_bf16": BLUE}


def picture(result: Mapping[str, Any]) -> Figure:
    """Draw the medians, and the range over all rounds."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 3.6), layout="constrained")
        speed, memory = figure.subplots(1, 2)
        speed.set_title("ResNet-50, 224 px: images/s")
        _lines(speed, result["rows"], "images_per_second", 1.0)
        if RECORD_DEVICE in result["machine"].get("device", ""):
            speed.axhline(RECORD, color=INK, linewidth=1, linestyle="--")
            speed.annotate(
                f"published for AMP: {RECORD:,.0f}",
                (1, RECORD),
                (0, 3),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
            )
        memory.set_title("peak of a training step, GiB")
        _lines(memory, result["rows"], "peak_bytes", 2.0**30)
        for axes in (speed, memory):
            axes.set_xlabel("batch")
            axes.set_ylim(bottom=0)
        speed.legend(frameon=False)
        return figure


def _lines(axes: Axes, rows: Any, key: str, unit: float) -> None:
    batches = sorted(
        {row["batch"] for row in rows if row["part"] == "resnet" and "batch" in row}
    )
    for precision, colour in COLOURS.items():
        found = {b: list(by_round(rows, precision, key, b).values()) for b in batches}
        points = {
            b: [v / unit for v in values] for b, values in found.items() if values
        }
        middle = [statistics.median(values) for values in points.values()]
        axes.plot(list(points), middle, "o-", color=colour, label=precision)
        for batch, values in points.items():
            axes.plot(
                [batch, batch], [min(values), max(values)], color=colour, linewidth=3
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
