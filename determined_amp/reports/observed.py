"""What the observation says about the prediction, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from determined_amp.finder.advice import FoundScale
from determined_amp.finder.verdict import Finding
from determined_amp.reports.figure import points_of
from determined_amp.reports.panels import seed_band
from determined_amp.reports.predict import counted
from determined_amp.reports.sources import Search

# The search that the finder spares: a grid of trainings just long enough to tell something.
_GRID_POINTS, _SHORT_TRAINING = 12, 200

# A scale is no better than others of the window if it is this close to their mean.
_SDS_OF_A_TIE = 2.0


def sentences(found: FoundScale | None, search: Search) -> Iterator[str]:
    """Where prediction and observation agree, what the search found, and what it cost."""
    finding = None if found is None else found.finding
    if finding is not None:
        yield from _overflow(finding, search)
        yield from _flush(finding, search)
        yield from _skips(finding, search)
    yield from _best(finding, search)
    if found is not None:
        yield from _cost(found, search)
    failed = [row for row in search.rows if row.reason]
    if failed:
        yield f"{len(failed)} trials failed; trial {failed[0].number}: {failed[0].reason}"


def _overflow(finding: Finding, search: Search) -> Iterator[str]:
    seen = [(row.scale_log2, row.overflow) for row in search.rows if row.overflow is not None]
    if not seen:
        return
    wrong = sorted(scale for scale, over in seen if over is not (scale > finding.top_log2))
    yield (
        f"overflow: predicted above 2^{finding.top_log2:g}, and "
        f"{len(seen) - len(wrong)} of {len(seen)} trials agree"
        + (f"; not those at {', '.join(f'2^{scale:g}' for scale in wrong)}" if wrong else "")
    )


def _flush(finding: Finding, search: Search) -> Iterator[str]:
    predicted = {p.scale_log2: p.flushed_share for p in finding.predicted}
    differences = [
        (abs(row.metrics["flushed_share"] - predicted[int(row.scale_log2)]), row.scale_log2)
        for row in search.rows
        if "flushed_share" in row.metrics and not row.overflow and row.scale_log2 in predicted
    ]
    if differences:
        most, where = max(differences)
        yield (
            f"flushed to 0: predicted and measured shares differ by {most:.2g} at most, "
            f"at 2^{where:g} ({len(differences)} trials)"
        )


def _skips(finding: Finding, search: Search) -> Iterator[str]:
    seen = [
        (row.skipped_steps, finding.expected_skips(row.scale_log2))
        for row in search.rows
        if row.skipped_steps is not None
    ]
    if seen:
        near = sum(abs(skipped - expected) <= 1 for skipped, expected in seen)
        yield (
            f"skipped steps: {near} of {len(seen)} trials skipped what was expected, or one more "
            "or less"
        )


def _best(finding: Finding | None, search: Search) -> Iterator[str]:
    points = points_of(search)
    if not points:
        yield f"no trial reported {search.metric} yet"
        return
    best = points[0]
    yield (
        f"best trial: 2^{best.scale_log2:g} with {search.metric} {best.value:.4g}"
        + (
            ""
            if finding is None or finding.choice_log2 is None
            else f"; the finder chose 2^{finding.choice_log2:g}"
        )
    )
    if search.also_searched:
        others = ", ".join(search.also_searched)
        yield f"the trials differ in {others}, too: {search.metric} does not rank the scales alone"
        return
    scored = any(row.scored for row in search.rows)
    band = None if scored else seed_band(points, finding)
    if band is not None and finding is not None:
        centre, spread = band
        distance = abs(best.value - centre)
        word = "a tie" if distance <= _SDS_OF_A_TIE * spread else "more than the seeds' noise"
        yield (
            f"inside the window {search.metric} is {centre:.4g}, and seeds differ by {spread:.2g} "
            f"(standard deviation); the best is {distance:.2g} from that: {word}"
        )


def _cost(found: FoundScale, search: Search) -> Iterator[str]:
    ours, theirs = found.passed_samples, counted(search, found)
    per_batch = found.run.samples / found.run.batches
    grid = _GRID_POINTS * _SHORT_TRAINING * per_batch
    yield (
        f"samples passed forward and backward: {ours} by the finder, {theirs:.0f} by this search "
        f"({theirs / ours:.0f} times as many), {grid:.0f} by a grid of {_GRID_POINTS} trainings "
        f"of {_SHORT_TRAINING} batches ({grid / ours:.0f} times)"
    )
