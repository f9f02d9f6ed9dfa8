"""The parts of a page: one HTML file with no script, no font and no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1f2329; --muted: #6b7279; --paper: #fefefe; --line: #d9dde1; --blue: #0072b2; }
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e7ea; --muted: #9aa1a8; --paper: #16191d; --line: #363c43; --blue: #56b4e9; } }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; }
svg { width: 100%; height: auto; } figure { margin: 1.5rem 0; }
figcaption, footer { color: var(--muted); font-size: 0.9rem; }
pre { border-left: 3px solid #009e73; padding: 0.5rem 1rem; overflow-x: auto; }
details { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.15rem 0.8rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The whole file.

    Args:
        title: Of the page.
        parts: HTML, one below the other; empty ones are left out.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in (f"<h1>{escape(title)}</h1>", *parts) if part)
        + "\n</body></html>\n"
    )


def bullets(sentences: Iterable[str]) -> str:
    """One item per sentence."""
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def picture(svg: str, caption: str) -> str:
    """A figure whose colours are those of `reports.figure.as_svg`, and what it shows."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], *, unfolded: bool = False
) -> str:
    """A table below its title, which folds it away.

    Args:
        title: What it holds.
        heads: Of its columns.
        rows: Their cells.
        unfolded: Show it from the start.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f"<details{' open' if unfolded else ''}><summary>{escape(title)}</summary>"
        f"<table><tr>{head}</tr>\n{body}</table></details>"
    )


def footer(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Who measured, and on what: by part, by name."""
    told = (
        f"<p>{escape(part)}: "
        + escape(", ".join(f"{name} {value}" for name, value in facts.items()))
        + "</p>"
        for part, facts in parts.items()
    )
    return f"<footer>{''.join(told)}</footer>"
