"""One HTML file with everything in it: no script, no font and no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from reports.forecast import Forecast
from reports.panels import power
from reports.sources import Search

# Of the trial table; the searcher's own metric comes first.
_METRICS = ("flushed_share", "overflow", "headroom_bits", "gradient_error", "validation_accuracy")

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
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.15rem 0.8rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
summary { cursor: pointer; font-weight: 600; margin-top: 1rem; }
"""

_CAPTION = (
    "Lines are predicted from one bfloat16 backward per batch, dots are measured in float16. "
    "Green: the safe window: nothing overflows and at most 1 % of the gradient values that "
    "are not 0 are flushed to 0. Red: a gradient overflows, the step is skipped, the scale halved. "
    "Amber band: mean and standard deviation over seeds, inside the window. Hollow: stopped early."
)


def page(
    title: str,
    *,
    svg: str,
    sentences: Sequence[str],
    forecast: Forecast | None,
    search: Search | None,
    provenance: Mapping[str, Mapping[str, Any]],
    yaml: str = "",
) -> str:
    """The whole document.

    Args:
        title: Of the page.
        svg: The figure, whose colours are those of `reports.figure.as_svg`.
        sentences: What is to be said, the verdict first.
        forecast: For its tables.
        search: For its table.
        provenance: Who measured, and on what: by part, by name.
        yaml: Lines to paste.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>",
        f"<pre>{escape(yaml)}</pre>" if yaml else "",
        f"<figure>{svg}<figcaption>{_CAPTION}</figcaption></figure>",
        *_tables(forecast, search),
        f"<footer>{''.join(_provenance(provenance))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _tables(forecast: Forecast | None, search: Search | None) -> Iterable[str]:
    if forecast is not None:
        measured = {m.scale_log2: m for m in forecast.measured}
        scales = (
            [
                power(p.scale_log2),
                f"{p.overflow_share:.2g}",
                f"{p.flushed_share:.2g}",
                _measured(measured.get(p.scale_log2)),
            ]
            for p in forecast.predicted
        )
        heads = ["init_scale", "overflow", "flushed to 0", "measured in float16"]
        yield _table("Scales: share of the gradient values", heads, scales)
        modules = (
            [m.name, power(min(m.values_by_log2)), power(max(m.values_by_log2) + 1)]
            if m.values_by_log2
            else [m.name, "all 0", ""]
            for m in reversed(forecast.modules)
        )
        yield _table(
            "Modules: gradients without a scale", ["module", "smallest", "largest, below"], modules
        )
    if search is not None:
        yield _trials(search)


def _measured(seen: Any) -> str:
    if seen is None:
        return ""
    return "overflow" if seen.overflow else f"{seen.flushed_share:.2g} flushed"


def _trials(search: Search) -> str:
    known = {name for row in search.rows for name in row.metrics}
    metrics = [m for m in (search.metric, *_METRICS) if m in known]
    skips = any(row.skipped_steps is not None for row in search.rows)
    heads = ["trial", "init_scale", *search.also_searched, "state", "batches", *metrics]
    heads += ["skipped_steps"] if skips else []
    rows = []
    for row in sorted(search.rows, key=lambda row: (row.scale_log2, row.number)):
        others = [str(row.hparams.get(name, "")) for name in search.also_searched]
        values = [_number(row.metrics.get(name)) for name in metrics]
        values += [_number(row.skipped_steps)] if skips else []
        start = [str(row.number), power(row.scale_log2), *others, row.state, str(row.batches)]
        rows.append([*start, *values])
    return _table(f"Trials: {len(rows)}", heads, rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "\n".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f"<details><summary>{escape(title)}</summary>"
        f"<table><tr>{head}</tr>\n{body}</table></details>"
    )


def _provenance(parts: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for part, facts in parts.items():
        told = ", ".join(f"{name} {value}" for name, value in facts.items())
        yield f"<p>{escape(part)}: {escape(told)}</p>"
