"""Draws the pictures of the README and the pages, and writes their tables.

    python -m benchmarks.readme

It reads benchmarks/results. If there is a `gpu.json` from `python -m benchmarks.gpu`,
its table replaces the sentence that no GPU has been measured.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.gpu import report as gpu_report
from benchmarks.loss_scale_rows import DEFAULT, FINDER, STEPS
from benchmarks.loss_scale_tasks import TASKS
from benchmarks.measured import RESULTS, ROOT
from benchmarks.peers import LINE_BEGINS, TABLE_BEGINS
from benchmarks.peers import line as line_of_costs
from benchmarks.peers import markdown as table_of_costs
from determined_amp.amp.settings import Precision
from determined_amp.finder.scale_score import DEFAULT_LOG2
from determined_amp.report.change import Change
from determined_amp.report.page import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    STYLE,
    VERMILION,
    Panel,
    as_png,
    draw_panels,
    spread_text,
)
from determined_amp.report.precision_report import change_panels
from determined_amp.report.precision_runs import Pair
from determined_amp.runs.run import Spread

README = ROOT / "README.md"
EVIDENCE_PAGE = ROOT / "docs" / "evidence.md"
PICTURE = ROOT / "docs" / "pictures" / "answers.png"
# The report on precisions for each model.
PRECISIONS = {
    "MLP": RESULTS / "precision_mlp_cpu.json",
    "wide MLP": RESULTS / "precision_wide_mlp_cpu.json",
    "ResNet-50": RESULTS / "precision_resnet50_cpu.json",
}
# The picture of each of these reports.
CHANGES = {
    "MLP": "precision_mlp.png",
    "wide MLP": "compare_answer.png",
    "ResNet-50": "precision_resnet50.png",
}
COSTS = RESULTS / "peers_cpu.json"
SCALES = RESULTS / "loss_scale_cpu.json"
GPU = RESULTS / "gpu.json"
NO_GPU = "No GPU has been measured yet."

_HEADS = (
    "| model | precision | validation accuracy, mean and sd | samples/s, median "
    "(range) | speed | skipped steps |"
)
# Without tf32, which is fp32 on a CPU; docs/precision.md uses it to show how much the
# speed of the machine varies.
_SHOWN = ("fp32", "amp_bf16", "amp_fp16")
_WAYS = (DEFAULT, FINDER)
_MOST_SKIPS = 12  # a longer bar is cut off, and shows its number
_COLOURS = {"amp_bf16": BLUE, "amp_fp16": VERMILION}


def draw(
    precisions: Mapping[str, Mapping[str, Any]], scales: Mapping[str, Any]
) -> Figure:
    """Draw three answers side by side: speed, accuracy and initial loss scale.

    Args:
        precisions: The JSON of `report`, by the name of the model.
        scales: The JSON of `benchmarks.loss_scale`.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 2.9), layout="constrained")
        speed, accuracy, scale = figure.subplots(1, 3, width_ratios=(1, 1, 1.25))
        compared = {
            f"{c['precision']}, {model}": c
            for model, found in precisions.items()
            for c in found["pairs"]
            if c["precision"] in _SHOWN
        }
        _draw_speed(speed, compared)
        _draw_accuracy(accuracy, compared, next(iter(precisions.values()))["margin"])
        _draw_scales(scale, scales["rows"])
        return figure


def _draw_speed(ax: Axes, compared: Mapping[str, Mapping[str, Any]]) -> None:
    ax.set_title("Is it faster?")
    # The results are logarithms of ratios.
    ratios = [
        [math.exp(c["speed"][end]) for end in ("low", "mean", "high")]
        for c in compared.values()
    ]
    for row, comparison in enumerate(compared.values()):
        colour = _COLOURS[comparison["precision"]]
        low, ratio, high = ratios[row]
        ax.barh(row, ratio, height=0.5, color=colour, alpha=0.3)
        ax.plot([low, high], [row, row], color=colour, linewidth=2)
        ax.text(high + 0.03, row, f"{ratio:.2f}x", va="center")
    ax.axvline(1, color=INK, linewidth=1)
    ax.text(0.98, -0.78, "fp32", ha="right", va="top", color=MUTED)
    ax.set_xlim(0, max(1.15, *(high * 1.3 for _, _, high in ratios)))
    ax.set_xlabel("speed, fp32 is 1; mean, 95 % interval")
    _label_rows(ax, list(compared))


def _draw_accuracy(
    ax: Axes, compared: Mapping[str, Mapping[str, Any]], margin: float
) -> None:
    ax.set_title("Is it as accurate?")
    ax.axvspan(-100 * margin, 100 * margin, color=GREEN, alpha=0.1, linewidth=0)
    ax.axvline(0, color=INK, linewidth=1)
    for row, comparison in enumerate(compared.values()):
        found, colour = comparison["metric"], _COLOURS[comparison["precision"]]
        ends = [100 * found["low"], 100 * found["high"]]
        ax.plot(ends, [row, row], color=colour, linewidth=2)
        ax.plot(100 * found["mean"], row, "o", color=colour)
    far = [
        abs(100 * c["metric"][end])
        for c in compared.values()
        for end in ("low", "high")
    ]
    reach = max(150 * margin, 1.1 * max(far))
    ax.set_xlim(-reach, reach)
    ax.set_xlabel(f"points, fp32 is 0; green: equal ±{100 * margin:g}")
    _label_rows(ax, ["" for _ in compared])


def _draw_scales(ax: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    ax.set_title("Which initial loss scale?")
    tasks = [task.name for task in TASKS]
    for y, task in enumerate(tasks):
        of = {
            w: [r["skipped"] for r in rows if (r["task"], r["way"]) == (task, w)]
            for w in _WAYS
        }
        default, found = (mean(skipped) for skipped in of.values())
        ax.barh(y, min(default, _MOST_SKIPS), height=0.5, color=VERMILION, alpha=0.4)
        ax.plot(found, y, "o", color=GREEN)
        if default > _MOST_SKIPS:
            ax.text(
                _MOST_SKIPS - 0.3,
                y,
                f"{default:.0f}",
                ha="right",
                va="center",
                color=INK,
            )
    ax.set_xlim(-0.6, _MOST_SKIPS)
    ax.set_xlabel(f"steps skipped of {STEPS}; bar: 2^{DEFAULT_LOG2}, dot: finder")
    _label_rows(ax, tasks)


def _label_rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.8)
    ax.tick_params(axis="y", length=0)


def table(precisions: Mapping[str, Mapping[str, Any]]) -> str:
    """The README's table, in Markdown."""
    rows = [row for model, found in precisions.items() for row in _rows(model, found)]
    return "\n".join([_HEADS, "|---|---|---|---|---|---|", *rows]) + "\n"


def _rows(model: str, found: Mapping[str, Any]) -> Iterator[str]:
    for row in found["table"]:
        name = row["precision"]
        if name in _SHOWN:
            accuracy = row["validation_accuracy"].replace(" ± ", ", ")
            speeds = spread_text(Spread(**row["samples/s"]))
            # Without a loss scale this is null, and no step can be skipped.
            skipped = (row["skipped"] or {"high": 0})["high"]
            yield (
                f"| {model} | `{name}` | {accuracy} | {speeds} | {row['speed']} | "
                f"{skipped:.0f} |"
            )


def with_table(readme: str, rows: str) -> str:
    """The text of the README, with a new table of precisions."""
    before, _, rest = readme.partition(_HEADS)
    _, _, after = rest.partition("\n\n")
    return f"{before}{rows}\n{after}"


def with_costs(page: str, result: Mapping[str, Any]) -> str:
    """The text of a page, with new costs of a batch.

    docs/evidence.md has the whole table, the README one line.
    """
    for begins, of in ((LINE_BEGINS, line_of_costs), (TABLE_BEGINS, table_of_costs)):
        there = rf"{re.escape(begins)}[^\n]*\n(\|[^\n]*\n)+"
        page = re.sub(there, of(result), page)
    return page


def with_gpu(readme: str, result: Mapping[str, Any]) -> str:
    """The text of the README, with a new table of a GPU.

    Args:
        readme: The text so far, with an older table or with the sentence `NO_GPU`.
        result: The JSON of `benchmarks.gpu`.
    """
    on = result["machine"]
    said = (
        f"On one {on['device']}, torch {on['torch']}, {on['date']}, images on the"
        " device:"
    )
    table_there = rf"On one [^\n]*:\n\n{re.escape(gpu_report.HEADS)}(?:\n\|.*)+"
    new = f"{said}\n\n{gpu_report.table(result)}".rstrip()
    return re.sub(f"{re.escape(NO_GPU)}|{table_there}", lambda _: new, readme, count=1)


def changes(found: Mapping[str, Any]) -> list[Panel]:
    """The panels of a report on precisions, from its JSON."""
    pairs = []
    for pair in found["pairs"]:
        of_speed = {**pair["speed"], "is_ratio": True}  # older results lack is_ratio
        speed, metric = Change(**of_speed), Change(**pair["metric"])
        names = Precision(pair["precision"]), Precision(pair["against"])
        pairs.append(Pair(*names, speed, None, metric, pair["lost_runs"]))
    return change_panels(pairs, found["metric"])


def read_precisions() -> dict[str, Any]:
    """The committed reports on precisions, by the name of the model."""
    return {model: json.loads(path.read_text()) for model, path in PRECISIONS.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    described = (
        "Draw pictures of the README and the pages, and write their tables, from "
        "benchmarks/results."
    )
    argparse.ArgumentParser(
        prog="python -m benchmarks.readme", description=described
    ).parse_args(arguments)
    precisions = read_precisions()
    PICTURE.write_bytes(as_png(draw(precisions, json.loads(SCALES.read_text()))))
    for model, name in CHANGES.items():
        drawn = as_png(draw_panels(changes(precisions[model])))
        PICTURE.with_name(name).write_bytes(drawn)
    costs = json.loads(COSTS.read_text())
    readme = with_costs(with_table(README.read_text(), table(precisions)), costs)
    EVIDENCE_PAGE.write_text(with_costs(EVIDENCE_PAGE.read_text(), costs))
    README.write_text(
        with_gpu(readme, json.loads(GPU.read_text())) if GPU.exists() else readme
    )


if __name__ == "__main__":
    main()
