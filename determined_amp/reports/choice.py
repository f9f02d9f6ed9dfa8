"""The finder's scale among the scales of a grid, for several models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from determined_amp.finder.verdict import Window
from determined_amp.reports import panels
from determined_amp.reports.figure import STYLE
from determined_amp.reports.panels import Point


def draw(models: Sequence[Mapping[str, Any]]) -> Figure:
    """Validation loss and skipped steps by scale, every seed thin.

    Args:
        models: As `benchmarks.loss_scale_choice` writes them: `name`, `window_log2`, `comparison`
            and `trainings`.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.0 * len(models), 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, len(models), squeeze=False, sharex="col", height_ratios=[2, 1])
        for column, model in enumerate(models):
            _draw_model(axes[0, column], axes[1, column], model)
        return figure


def _draw_model(loss: Axes, skips: Axes, model: Mapping[str, Any]) -> None:
    comparison, trainings = model["comparison"], model["trainings"]
    low, top = model["window_log2"]
    window = Window(low, top, comparison["choice_log2"])
    losses = [Point(t["scale_log2"], t["validation_loss"], t["seed"]) for t in trainings]
    panels.metric(loss, losses, "validation_loss", window)
    skipped = [Point(t["scale_log2"], t["skipped_steps"]) for t in trainings]
    panels.skips(skips, skipped, window)
    for axes in (loss, skips):
        panels.mark_scales(axes, window, label=axes is loss)
        axes.set_xlim(min(p.scale_log2 for p in losses) - 1, max(p.scale_log2 for p in losses) + 1)
    loss.set_title(f"{model['name']}: {comparison['verdict']}", pad=18)
    skips.set_xlabel("log₂ of the initial loss scale")
