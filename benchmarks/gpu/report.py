"""Writes the report of `benchmarks.gpu`, and its picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.goals import BATCH, by_round, words
from benchmarks.measured import spread

HEADS = (
    f"| ResNet-50, 224 px, batch {BATCH} | images/s, median (range) | times FP32 | "
    "times TF32 | peak memory, GiB | of FP32's |"
)
PRECISIONS = ("fp32", "tf32", "amp_fp16", "amp_bf16")


def table(result: Mapping[str, Any]) -> str:
    """The README's table: the four precisions at the batch size of the YAML."""
    rows = [_row(result["rows"], precision) for precision in PRECISIONS]
    return "\n".join([HEADS, "|---|---|---|---|---|---|", *filter(None, rows)]) + "\n"


def _row(rows: Sequence[Mapping[str, Any]], precision: str) -> str | None:
    speed, peak = (
        {p: list(by_round(rows, p, key).values()) for p in PRECISIONS}
        for key in ("images_per_second", "peak_bytes")
    )
    if not speed[precision]:
        return None
    middle = {p: statistics.median(v) for p, v in speed.items() if v}
    memory = {p: statistics.median(v) for p, v in peak.items() if v}
    times = [
        f"{middle[precision] / middle[base]:.2f}x" if base in middle else ""
        for base in ("fp32", "tf32")
    ]
    share = [""] * 2
    if precision in memory:
        share[0] = f"{memory[precision] / 2**30:.1f}"
        share[1] = (
            f"{memory[precision] / memory['fp32']:.0%}" if "fp32" in memory else ""
        )
    speeds = speed[precision]
    shown = spread(speeds, ",.0f")
    return f"| {' | '.join([f'`{precision}`', shown, *times, *share])} |"


def markdown(result: Mapping[str, Any]) -> str:
    """The whole report: machine, goals, table, all other medians, and notes."""
    known = {
        name: value for name, value in result["machine"].items() if value is not None
    }
    lines = [", ".join(f"{name} {value}" for name, value in known.items()), ""]
    lines += ["```", words(result["goals"]), "```", "", table(result)]
    lines += ["| part | what | value, median (range) |", "|---|---|---|"]
    lines += list(_others(result["rows"]))
    lines += ["", "Notes and seconds of each part:", ""]
    lines += [
        f"* {row['part']}: {row.get('note', '')}{row.get('seconds', '')}"
        for row in result["rows"]
        if "note" in row or "seconds" in row
    ]
    return "\n".join(lines) + "\n"


# Keys of measured values; the other keys of a row say what was measured.
_VALUES = {
    "value",
    "images_per_second",
    "peak_bytes",
    "compile_seconds",
    "saved_bytes",
    "step_seconds",
    "predicted_batch",
    "synchronisations",
}


def _others(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        about = {k: v for k, v in row.items() if k not in (*_VALUES, "part", "round")}
        if {"note", "machine", "seconds"} & about.keys():
            continue
        said = ", ".join(
            f"{name} {value}" for name, value in about.items() if value is not None
        )
        for key in _VALUES & row.keys():
            if row[key] is not None:
                groups.setdefault((row["part"], said, key), []).append(float(row[key]))
    for (part, said, key), values in groups.items():
        yield f"| {part} | {said}: {key.replace('_', ' ')} | {spread(values, ',.4g')} |"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw speed and memory by batch size; if that fails, print why."""
    try:
        # A machine with a GPU may lack matplotlib.
        from benchmarks.gpu.picture import picture  # noqa: PLC0415

        picture(result).savefig(path, dpi=110)
    except Exception as error:  # the command must go on without a picture
        print(f"no picture: {error}")
