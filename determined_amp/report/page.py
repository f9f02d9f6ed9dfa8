"""Writes a report: its text in Markdown, its picture as PNG, and its numbers as JSON.

The palette of the pictures is by Okabe and Ito: people with any colour vision can tell its colours
apart.
"""

from __future__ import annotations

import dataclasses
import io
import json
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from determined_amp.amp.plain_data import Values
from determined_amp.experiment.fields import plain
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


@dataclasses.dataclass(frozen=True)
class Written:
    """A report that was written."""

    text: str  # the answer, the lines to paste, and all sentences
    files: Sequence[Path]  # the PNG, Markdown and JSON files


def write_page(
    folder: Path,
    name: str,
    *,
    answer: str,
    yaml: str,
    sentences: Sequence[str],
    picture: tuple[Figure, str],
    table: tuple[Sequence[str], Sequence[Sequence[Any]]],
    origin: str,
    record: Values,
) -> Written:
    """Write a report into a folder.

    Args:
        folder: The folder, which is made if it is missing.
        name: Name of the files, without their suffix.
        answer: The first line.
        yaml: Lines to paste; may be empty.
        sentences: All that is said besides the answer.
        picture: The picture, and the text below it.
        table: Heads and rows of the numbers.
        origin: What they were measured on, and how.
        record: More values for the JSON, which has null for what is not finite.

    Raises:
        ReportError: if a file cannot be written.
    """
    items = "\n".join(f"* {sentence}" for sentence in sentences)
    paste = f"```yaml\n{yaml}\n```" if yaml else ""
    figure, caption = picture
    image = f"![{caption}]({name}.png)"
    markdown = _markdown(f"# {answer}", paste, items, image, markdown_table(*table), origin)
    files = {
        folder / f"{name}.png": as_png(figure),
        folder / f"{name}.md": f"{markdown}\n".encode(),
        folder / f"{name}.json": _numbers(answer, sentences, record).encode(),
    }
    write_files(folder, files)
    return Written("\n\n".join(filter(None, [answer, yaml, items])), list(files))


def _markdown(*parts: str) -> str:
    text = "\n\n".join(filter(None, parts))
    # What looks like a tag, in a name that somebody else chose, stays text.
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def _numbers(answer: str, sentences: Sequence[str], record: Values) -> str:
    drawn = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "matplotlib": matplotlib.__version__,
    }
    numbers = plain({_DRAWN: drawn, "answer": answer, "sentences": sentences, **record})
    finite = json.loads(json.dumps(numbers), parse_constant=lambda name: None)
    return json.dumps(finite, indent=2)


def write_files(folder: Path, files: Mapping[Path, bytes]) -> None:
    """Write the files of a report into a folder, all of them or none.

    Raises:
        ReportError: if one cannot be written, or would replace JSON that is no report.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
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


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as Markdown, its first column to the left."""
    rule = ["---", *["---:"] * (len(heads) - 1)]
    lines = [f"| {' | '.join(map(_cell, cells))} |" for cells in (heads, rule, *rows)]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


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
