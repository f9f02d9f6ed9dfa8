"""Writes a report: its text in Markdown, its picture as PNG, and its numbers as JSON.

The palette of the pictures is by Okabe and Ito: people with any colour vision can tell its colours
apart.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from determined_amp.experiment.files import write_together
from determined_amp.report import ReportError

# The key of every report as JSON that no other file has.
_DRAWN = "drawn"

INK, MUTED, PAPER, BLUE = "#1f2329", "#6b7279", "#fefefe", "#0072b2"
VERMILION, GREEN, AMBER = "#d55e00", "#009e73", "#b07800"

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
}

# Separates text from the lines behind it.
_HALO = [withStroke(linewidth=3, foreground=PAPER)]


def write_page(
    folder: Path, name: str, markdown: str, figure: Figure, record: Mapping[str, Any]
) -> list[Path]:
    """Write a report into a folder, and return its files.

    Args:
        folder: The folder.
        name: Name of the files, without their suffix.
        markdown: The text, which shows the picture `NAME.png`.
        figure: The picture.
        record: The numbers: plain values, dataclasses and enums. JSON has no infinity and no NaN;
            they become null.

    Raises:
        ReportError: if a file cannot be written.
    """
    drawn = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "matplotlib": matplotlib.__version__,
    }
    numbers = _plain({_DRAWN: drawn, **record})
    # What looks like a tag, in a name that somebody else chose, stays text.
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", markdown)
    files = {
        folder / f"{name}.png": as_png(figure),
        folder / f"{name}.md": text.encode(),
        folder / f"{name}.json": json.dumps(numbers, indent=2, allow_nan=False).encode(),
    }
    write_files(folder, files)
    return list(files)


def write_files(folder: Path, files: Mapping[Path, bytes]) -> None:
    """Write the files of a report into a folder, all of them or none.

    Raises:
        ReportError: if one cannot be written, or would replace JSON that is no report.
    """
    try:
        for path in files:
            if path.suffix == ".json" and path.is_file() and f'"{_DRAWN}"' not in path.read_text():
                raise ReportError(
                    f"{path}: is there, and no report; allowed: --output with another folder"
                )
        write_together({path: [content] for path, content in files.items()})
    except (OSError, ValueError) as error:
        raise ReportError(
            f"{folder}: the report cannot be written: {error}; allowed: --output with a folder "
            "that can"
        ) from error


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown, its first column to the left."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    lines = [_table_line(cells) for cells in (heads, rule, *rows)]
    return "\n".join(lines)


def _table_line(cells: Sequence[str]) -> str:
    on_one_line = [re.sub(r"\s+", " ", cell) for cell in cells]
    escaped = [cell.replace("|", r"\|") for cell in on_one_line]
    return f"| {' | '.join(escaped)} |"


def dots(
    axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str = "", **style: Any
) -> None:
    """Draw these points, if there are any, without a line."""
    if points:
        style = {"marker": "o", "linestyle": "none", **style}
        axes.plot(*zip(*points, strict=True), color=color, label=label or None, **style)


def annotate(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    away: tuple[float, float],
    color: str = INK,
    **style: Any,
) -> None:
    """Write text beside a point, `away` in points of 1/72 inch, readable over lines."""
    axes.annotate(
        text, at, away, textcoords="offset points", color=color, path_effects=_HALO, **style
    )


def as_png(figure: Figure) -> bytes:
    """A figure as a PNG with a white background."""
    written = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(written, dpi=130, facecolor=PAPER, metadata={"Software": None})
    return written.getvalue()


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, enum.Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value
