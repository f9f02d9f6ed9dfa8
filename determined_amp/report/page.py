"""Writes a report: Markdown, the same text as an HTML page, its picture, and its numbers as JSON.

The page needs no other file: no script, font or picture. Figures use the colours of the page, which
follow the reader's colour scheme. The palette is by Okabe and Ito: people with any colour vision
can tell its colours apart.
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
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from markdown_it import MarkdownIt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from determined_amp.experiment.files import write_together
from determined_amp.report import ReportError

# `as_svg` replaces these with the page's variables, so no other colour may have these values.
INK, MUTED, PAPER, BLUE = "#1f2329", "#6b7279", "#fefefe", "#0072b2"

# The key of every report as JSON that no other file has.
_DRAWN = "drawn"

VERMILION, GREEN, AMBER = "#d55e00", "#009e73", "#b07800"

# Separates text from the lines behind it.
HALO = [withStroke(linewidth=3, foreground=PAPER)]

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
    "svg.fonttype": "none",
    "svg.hashsalt": "determined_amp",
}

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1f2329; --muted: #6b7279; --paper: #fefefe; --line: #d9dde1; --blue: #0072b2; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e7ea; --muted: #9aa1a8; --paper: #16191d; --line: #363c43; --blue: #56b4e9; } }
body { margin: 2rem auto; max-width: 74rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1, pre { border-left: 3px solid #009e73; padding-left: 1rem; }
h1 { font-size: 1.2rem; } p, li { overflow-wrap: anywhere; } ul { padding-left: 1.2rem; }
figure { margin: 1.5rem 0; overflow-x: auto; } svg { width: 100%; min-width: 40rem; height: auto; }
figcaption, body > p:last-child { color: var(--muted); font-size: 0.9rem; }
table { display: block; overflow-x: auto; border-collapse: collapse; margin: 1.5rem 0;
  font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.15rem 0.8rem; border-bottom: 1px solid var(--line); }
"""


def write(
    folder: Path, name: str, markdown: str, figure: Figure, record: Mapping[str, Any]
) -> list[Path]:
    """Write a report into a folder, and return its files.

    Args:
        folder: The folder.
        name: Name of the files, without their suffix.
        markdown: The text, beginning with its heading. The page shows `figure` in place of its
            picture `NAME.png`.
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
    numbers = {_DRAWN: drawn, **record}
    files = {
        folder / f"{name}.png": as_png(figure),
        folder / f"{name}.html": as_html(markdown, as_svg(figure)).encode(),
        # Here, too, tags in names from outside stay text.
        folder / f"{name}.md": re.sub(r"<(?=[A-Za-z/!?])", "&lt;", markdown).encode(),
        folder / f"{name}.json": json.dumps(_plain(numbers), indent=2, allow_nan=False).encode(),
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


def dots(
    axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str = "", **style: Any
) -> None:
    """Draw these points, if there are any, without a line."""
    if points:
        style = {"marker": "o", "linestyle": "none", **style}
        axes.plot(*zip(*points, strict=True), color=color, label=label or None, **style)


def note(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    away: tuple[float, float],
    color: str = INK,
    **style: Any,
) -> None:
    """Write text beside a point, `away` in points of 1/72 inch, readable over lines."""
    axes.annotate(
        text, at, away, textcoords="offset points", color=color, path_effects=HALO, **style
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown, its first column to the left; empty without rows."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    cells = ([re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) if len(lines) > 2 else ""


def as_html(markdown: str, svg: str) -> str:
    """Markdown as an HTML page: its first line is the title, and `svg` takes a picture's place."""
    title = markdown.partition("\n")[0].lstrip("# ")
    # Without the preset's `html`, tags in names that others wrote stay text.
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)

    def picture(image: re.Match[str]) -> str:
        return f"<figure>{svg}<figcaption>{image[1]}</figcaption></figure>"

    body = re.sub(r'<p><img src="[^"]*" alt="([^"]*)" /></p>', picture, body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}</body></html>\n"
    )


def as_png(figure: Figure) -> bytes:
    """A figure as a PNG with a white background."""
    return _saved(figure, dpi=130, facecolor=PAPER, metadata={"Software": None})


def _saved(figure: Figure, **options: Any) -> bytes:
    written = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(written, **options)
    return written.getvalue()


def as_svg(figure: Figure) -> str:
    """A figure as an SVG element, in the colours of the page around it.

    The colours become the page's variables `--ink`, `--muted`, `--paper` and `--blue`.
    """
    svg = _saved(figure, format="svg", transparent=True, metadata={"Date": None}).decode()
    inks = {INK: "--ink", MUTED: "--muted", PAPER: "--paper", BLUE: "--blue"}
    for color, name in inks.items():
        svg = svg.replace(color, f"var({name})")
    return svg[svg.index("<svg") :]


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
