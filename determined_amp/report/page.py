"""The parts of an HTML page that needs no other file: no script, font or picture.

Figures use the colours of the page, which follow the reader's colour scheme. The palette is by
Okabe and Ito: people with any colour vision can tell its colours apart.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

# `as_svg` replaces these with the page's variables, so no other colour may have these values.
INK, MUTED, PAPER, BLUE = "#1f2329", "#6b7279", "#fefefe", "#0072b2"

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
    "svg.hashsalt": "loss scale",
}

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1f2329; --muted: #6b7279; --paper: #fefefe; --line: #d9dde1; --blue: #0072b2; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e7ea; --muted: #9aa1a8; --paper: #16191d; --line: #363c43; --blue: #56b4e9; } }
body { margin: 2rem auto; max-width: 74rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; }
p, li { overflow-wrap: anywhere; } ul { padding-left: 1.2rem; }
.verdict { border-left: 3px solid #009e73; padding-left: 1rem; font-size: 1.1rem;
  font-weight: 600; }
figure { margin: 1.5rem 0; } figure > div, details, .table { overflow-x: auto; }
svg { width: 100%; min-width: 40rem; height: auto; }
figcaption, footer { color: var(--muted); font-size: 0.9rem; }
pre { border-left: 3px solid #009e73; padding: 0.5rem 1rem; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.15rem 0.8rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The whole HTML file.

    Args:
        title: Title of the page.
        parts: HTML of its parts, from top to bottom; empty ones are left out.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in (f"<h1>{escape(title)}</h1>", *parts) if part)
        + "\n</body></html>\n"
    )


def verdict(sentence: str, lines: str) -> str:
    """The verdict, the first part of a page.

    Args:
        sentence: The verdict.
        lines: Lines to paste into a YAML; may be empty.
    """
    said = f'<p class="verdict">{escape(sentence)}</p>'
    return said + (f"<pre>{escape(lines)}</pre>" if lines else "")


def bullets(sentences: Iterable[str]) -> str:
    """A list with an item per sentence."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def picture(svg: str, caption: str) -> str:
    """A figure from `as_svg`, with its caption."""
    return f"<figure><div>{svg}</div><figcaption>{escape(caption)}</figcaption></figure>"


def table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, folded: bool = True
) -> str:
    """A table with a title; a table wider than the page scrolls.

    Args:
        title: Title of the table.
        heads: Heads of the columns.
        rows: Cells of the rows.
        folded: Whether only the title shows until the reader opens the table.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    cells = f"<table><tr>{head}</tr>\n{body}</table>"
    if folded:
        return f"<details><summary>{escape(title)}</summary>{cells}</details>"
    return f'<h2>{escape(title)}</h2><div class="table">{cells}</div>'


def footer(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The origin of the numbers: a paragraph per part, with facts by name."""
    told = (
        f"<p>{escape(part)}: "
        + escape(", ".join(f"{name} {value}" for name, value in facts.items()))
        + "</p>"
        for part, facts in parts.items()
    )
    return f"<footer>{''.join(told)}</footer>"


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG with a white background."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=130, facecolor=PAPER, metadata={"Software": None})


def as_svg(figure: Figure) -> str:
    """A figure as an SVG element, in the colours of the page around it.

    The colours become the page's variables `--ink`, `--muted`, `--paper` and `--blue`.
    """
    written = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    inks = {INK: "--ink", MUTED: "--muted", PAPER: "--paper", BLUE: "--blue"}
    for color, name in inks.items():
        svg = svg.replace(color, f"var({name})")
    return svg[svg.index("<svg") :]
