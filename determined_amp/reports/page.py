"""The page on the loss scale: sentences, the figure, and what it was drawn from as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from determined_amp.finder.passes import Observation
from determined_amp.finder.verdict import Finding
from determined_amp.reports.document import bullets, document, footer, picture, table
from determined_amp.reports.panels import power
from determined_amp.reports.sources import Search

# Of the trial table; the searcher's own metric comes first.
_METRICS = (
    "flushed_share",
    "overflow",
    "backward_headroom_bits",
    "gradient_error",
    "validation_accuracy",
)

_CAPTION = (
    "Lines are predicted from one bfloat16 backward per batch, dots are measured in float16. "
    "Green: the safe window: nothing overflows, and no gradient loses more than 0.1 % of its norm, "
    "flushed to 0. Red: a gradient overflows, the step is skipped, the scale halved. "
    "Amber band: mean and standard deviation over seeds, inside the window. Hollow: stopped early."
)


def page(
    title: str,
    *,
    svg: str,
    sentences: Sequence[str],
    finding: Finding | None,
    search: Search | None,
    provenance: Mapping[str, Mapping[str, Any]],
    yaml: str = "",
) -> str:
    """The whole document.

    Args:
        title: Of the page.
        svg: The figure, whose colours are those of `determined_amp.reports.figure.as_svg`.
        sentences: What is to be said, the verdict first.
        finding: For its tables.
        search: For its table.
        provenance: Who measured, and on what: by part, by name.
        yaml: Lines to paste.
    """
    parts = [
        bullets(sentences),
        f"<pre>{escape(yaml)}</pre>" if yaml else "",
        picture(svg, _CAPTION),
        *_tables(finding, search),
        footer(provenance),
    ]
    return document(title, parts)


def _tables(finding: Finding | None, search: Search | None) -> Iterable[str]:
    if finding is not None:
        measured = {m.scale_log2: m for m in finding.verified}
        scales = (
            [
                power(p.scale_log2),
                f"{p.overflow_share:.2g}",
                f"{p.flushed_share:.2g}",
                _measured(measured.get(p.scale_log2)),
            ]
            for p in finding.predicted
        )
        heads = ["init_scale", "overflow", "flushed to 0", "measured in float16"]
        yield table("Scales: share of the gradient values", heads, scales)
        modules = (
            [m.name, power(min(m.values_by_log2)), power(max(m.values_by_log2) + 1)]
            if m.values_by_log2
            else [m.name, "all 0", ""]
            for m in reversed(finding.modules)
        )
        yield table(
            "Modules: gradients without a scale", ["module", "smallest", "largest, below"], modules
        )
    if search is not None:
        yield _trials(search)


def _measured(seen: Observation | None) -> str:
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
    return table(f"Trials: {len(rows)}", heads, rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
