"""Writes a report: its text in Markdown, its numbers as JSON, and a picture as PNG.

The pictures use the palette of Okabe and Ito, whose colours people with any colour
vision can tell apart.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from determined_amp.amp.errors import UserError
from determined_amp.amp.fields import plain
from determined_amp.amp.plain_data import Values
from determined_amp.experiment.files import write_whole
from determined_amp.runs.run import Spread

# A head and a cell for each column; all rows of a table have the same heads.
Row = list[tuple[str, Any]]
Table = list[Row]

# Only the JSON of a report has this key. It protects other files from being replaced.
_DRAWN = "drawn"

INK = "#1f2329"
MUTED = "#6b7279"
PAPER = "#fefefe"
BLUE = "#0072b2"
VERMILION = "#d55e00"
GREEN = "#009e73"

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


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of a picture."""

    title: str
    xlabel: str
    dots: Sequence[tuple[float, float]]
    line: str = "-"  # matplotlib's style of the line that joins the dots
    # Lengths of the error bars below each dot, then above each dot.
    errors: Sequence[Sequence[float]] | None = None
    names: Sequence[str] = ()  # a label for each dot
    band: tuple[float, float] | None = None  # range in which a change does not matter


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Draw some panels side by side."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.0, 3.0), layout="constrained")
        places = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel in zip(places, panels, strict=True):
            _draw(axes, panel)
        return figure


def _draw(axes: Axes, panel: Panel) -> None:
    x, y = zip(*panel.dots, strict=True)
    style: Values = {"marker": "o", "markersize": 3, "linestyle": panel.line}
    axes.errorbar(x, y, panel.errors, color=BLUE, capsize=5, **style)
    if panel.band is not None:
        axes.axhspan(*panel.band, color=GREEN, alpha=0.14, linewidth=0)
    if panel.names:
        axes.set_xticks(x, panel.names)
        axes.set_xlim(-0.6, len(x) - 0.4)
    axes.set(title=panel.title, xlabel=panel.xlabel)


@dataclasses.dataclass(frozen=True)
class Written:
    """A report that was written."""

    text: str  # the answer, the lines to paste, and all sentences
    files: Sequence[Path]  # Markdown, JSON, and a picture if there is one


def write_page(
    folder: Path,
    name: str,
    *,
    answer: str,
    yaml: str,
    sentences: Sequence[str],
    table: Table,
    origin: str,
    record: Values,
    panels: Sequence[Panel] = (),
    caption: str = "",
) -> Written:
    """Write the files of a report into a folder, see `write_files`.

    Args:
        folder: The folder.
        name: The name of the files.
        answer: The first line.
        yaml: Lines to paste; may be empty.
        sentences: All sentences besides the answer.
        table: The numbers.
        origin: What the numbers were measured on, and how.
        record: Further values for the JSON. Numbers that are not finite become null.
        panels: The panels of the picture; without them there is none.
        caption: The text below the picture.
    """
    items = "\n".join(f"* {sentence}" for sentence in sentences)
    paste = f"```yaml\n{yaml}\n```" if yaml else ""
    image = f"![{caption}]({name}.png)" if panels else ""
    numbers = _markdown(table)
    page = _paragraphs(f"# {answer}", paste, items, image, numbers, origin)
    # A name that looks like an HTML tag must stay visible.
    page = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", page)
    rows = [dict(row) for row in table]
    told = {"answer": answer, "sentences": sentences, "table": rows}
    files = {
        folder / f"{name}.md": f"{page}\n".encode(),
        folder / f"{name}.json": _json({**told, **record}).encode(),
    }
    if panels:
        files[folder / f"{name}.png"] = as_png(draw_panels(panels))
    write_files(folder, files)
    return Written(_paragraphs(answer, yaml, items), list(files))


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))


def _json(numbers: Values) -> str:
    drawn = datetime.now(timezone.utc).isoformat(timespec="seconds")
    text = json.dumps(plain({_DRAWN: drawn, **numbers}))
    finite = json.loads(text, parse_constant=lambda name: None)
    return json.dumps(finite, indent=2)


def write_files(folder: Path, files: Mapping[Path, bytes]) -> None:
    """Write the files of a report into a folder.

    Raises:
        UserError: if a file cannot be written, or would replace JSON that is no report.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in files:
            if (
                path.suffix == ".json"
                and path.is_file()
                and f'"{_DRAWN}"' not in path.read_text()
            ):
                raise UserError(
                    f"{path}: is there, and no report; allowed: --output with another "
                    "folder"
                )
        for path, content in files.items():
            write_whole(path, content)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}: the report cannot be written: {error}; allowed: --output with "
            "a folder that can"
        ) from error


def _markdown(table: Table) -> str:
    """A table in Markdown, with its first column aligned to the left."""
    heads = [head for head, _ in table[0]]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    lines = [_line(heads), _line(rule)]
    lines += [_line([cell for _, cell in row]) for row in table]
    return "\n".join(lines)


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Spread):
        return spread_text(value)
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return re.sub(r"\s+", " ", text).replace("|", r"\|")


def spread_text(spread: Spread) -> str:
    """The median, and the range if its ends still differ after rounding."""
    median, low, high = map(_short, (spread.median, spread.low, spread.high))
    return median if low == high else f"{median} ({low} to {high})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def as_png(figure: Figure) -> bytes:
    """A figure as a PNG with a white background."""
    written = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(written, dpi=130, facecolor=PAPER, metadata={"Software": None})
    return written.getvalue()
