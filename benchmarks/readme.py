"""Draw the README's picture and write its table, both from the results in `benchmarks/results`.

python -m benchmarks.readme
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from determined_amp.finder.verdict import DEFAULT_LOG2
from determined_amp.reports.page import BLUE, GREEN, INK, MUTED, STYLE, VERMILION, save_png

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "pictures" / "answers.png"
PRECISIONS = ROOT / "benchmarks" / "results" / "precision_mlp_cpu.json"
SCALES = ROOT / "benchmarks" / "results" / "loss_scale_choice_cpu.json"

_HEADS = (
    "| precision | validation accuracy, mean and sd | samples/s, median (range) | skipped steps |"
)
# tf32 is fp32 on a CPU: the page of the comparison shows it as the drift of the machine.
_SHOWN = ("fp32", "amp_bf16", "amp_fp16")
_NAMES = {"MLP": "MLP", "SummedLoss": "summed loss", "TinyLoss": "tiny loss"}
_COLOURS = {"amp_bf16": BLUE, "amp_fp16": VERMILION}


def draw(precisions: Mapping[str, Any], scales: Mapping[str, Any]) -> Figure:
    """Three answers side by side: the speed, the accuracy, the initial loss scale.

    Args:
        precisions: The JSON of the report on the precisions.
        scales: The JSON of `benchmarks.loss_scale_choice`.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 2.9), layout="constrained")
        FigureCanvasAgg(figure)
        speed, accuracy, scale = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
        compared = [c for c in precisions["comparisons"] if c["precision"] in _SHOWN]
        _draw_speed(speed, compared)
        _draw_accuracy(accuracy, compared, precisions["margin"])
        _draw_scales(scale, scales["models"])
        return figure


def _draw_speed(ax: Axes, compared: Sequence[Mapping[str, Any]]) -> None:
    ax.set_title("Is it faster?")
    for row, comparison in enumerate(compared):
        speed, colour = comparison["speed"], _COLOURS[comparison["precision"]]
        ax.barh(row, speed["median"], height=0.5, color=colour, alpha=0.3)
        ax.plot([speed["low"], speed["high"]], [row, row], color=colour, linewidth=2)
        ax.text(speed["high"] + 0.03, row, f"{speed['median']:.2f}x", va="center")
    ax.axvline(1, color=INK, linewidth=1)
    ax.text(0.98, -0.78, "fp32", ha="right", va="top", color=MUTED)
    ax.set_xlim(0, max(1.15, *(c["speed"]["high"] * 1.2 for c in compared)))
    ax.set_xlabel("speed, fp32 is 1; median, range")
    _label_rows(ax, [comparison["precision"] for comparison in compared])


def _draw_accuracy(ax: Axes, compared: Sequence[Mapping[str, Any]], margin: float) -> None:
    ax.set_title("Is it as accurate?")
    ax.axvspan(-100 * margin, 100 * margin, color=GREEN, alpha=0.1, linewidth=0)
    ax.axvline(0, color=INK, linewidth=1)
    for row, comparison in enumerate(compared):
        found, colour = comparison["difference"], _COLOURS[comparison["precision"]]
        ends = [100 * found["low"], 100 * found["high"]]
        ax.plot(ends, [row, row], color=colour, linewidth=2)
        ax.plot(100 * found["mean"], row, "o", color=colour)
    ax.set_xlim(-150 * margin, 150 * margin)
    ax.set_xlabel(f"points, fp32 is 0; green: equal ±{100 * margin:g}")
    _label_rows(ax, ["" for _ in compared])


def _draw_scales(ax: Axes, models: Sequence[Mapping[str, Any]]) -> None:
    ax.set_title("Which initial loss scale?")
    for row, model in enumerate(models):
        low, top = model["window_log2"]
        ax.barh(row, top - low, left=low, height=0.5, color=GREEN, alpha=0.25)
        ax.plot(model["comparison"]["choice_log2"], row, "o", color=GREEN)
    ax.axvline(DEFAULT_LOG2, color=MUTED, linestyle="--")
    ax.text(DEFAULT_LOG2 + 0.8, -0.78, f"default 2^{DEFAULT_LOG2}", va="top", color=MUTED)
    ax.set_xlabel("log₂ of the scale; bar: safe, dot: chosen")
    _label_rows(ax, [_NAMES[model["name"]] for model in models])


def _label_rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.8)
    ax.tick_params(axis="y", length=0)


def table(precisions: Mapping[str, Any]) -> str:
    """The README's rows, Markdown."""
    rows = {row["precision"]: row for row in precisions["precisions"]}
    skipped = {
        name: [run["skipped_steps"] for run in precisions["runs"] if run["precision"] == name]
        for name in _SHOWN
    }
    lines = [_HEADS, "|---|---|---|---|"]
    for name in _SHOWN:
        row, speed = rows[name], rows[name]["samples_per_second"]
        accuracy = f"{row['mean']:.3f}, {row['std']:.3f}"
        speeds = f"{speed['median']:.0f} ({speed['low']:.0f} to {speed['high']:.0f})"
        lines.append(f"| `{name}` | {accuracy} | {speeds} | {max(skipped[name]):.0f} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, rows: str) -> str:
    """The text of the README with these rows in place of its own."""
    before, _, rest = readme.partition(_HEADS)
    _, _, after = rest.partition("\n\n")
    return f"{before}{rows}\n{after}"


def main() -> None:
    precisions = json.loads(PRECISIONS.read_text())
    save_png(draw(precisions, json.loads(SCALES.read_text())), PICTURE)
    README.write_text(with_table(README.read_text(), table(precisions)))


if __name__ == "__main__":
    main()
