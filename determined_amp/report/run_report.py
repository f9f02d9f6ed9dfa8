"""The report on one run: how it ended, its curves, and where its files are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from determined_amp.amp.metric_names import MetricName
from determined_amp.report import Sentences
from determined_amp.report.comparison import changes_of
from determined_amp.report.page import BLUE, STYLE, Row, Table, Written, write_page
from determined_amp.report.precision_report import spread_text
from determined_amp.runs.run import ACCURACY, METRIC, PRECISION, Run

_CAPTION = "A dot per report: the training loss, a validation metric, the loss scale."

# The title of a panel, and batches and value of its dots.
Curve = tuple[str, Sequence[tuple[int, float]]]


def write_run_report(run: Run, folder: Path) -> Written:
    """Write the report on a run into a folder.

    Raises:
        ReportError: if it cannot be written.
    """
    curves = curves_of(run)
    return write_page(
        folder,
        "report",
        answer=_answer(run),
        yaml="",
        sentences=list(run_sentences(run)),
        figure=_draw(curves),
        caption=_CAPTION,
        table=_validations(run),
        origin=f"{run.name}; on {run.machine.device}, torch {run.machine.torch}.",
        record={"settings": run.settings, "curves": dict(curves)},
    )


def _answer(run: Run) -> str:
    """How the run ended, and its last metric."""
    precision = run.settings.get(PRECISION, "the trial's own precision")
    end = f"{precision}: {run.state.value}, {run.trained_batches} batches"
    if run.reason:
        return f"{end}: {run.reason}"
    metric = metric_of(run)
    value = run.metrics.get(metric)
    return end if value is None else f"{end}: {metric} {value:.4g}"


def metric_of(run: Run) -> str:
    """The accuracy if the run reports it, else the metric of its searcher."""
    return ACCURACY if ACCURACY in run.metrics else str(run.settings.get(METRIC))


def run_sentences(run: Run) -> Sentences:
    """What was measured and changed, and where the files are."""
    applied = run.last(MetricName.APPLIED_STEPS)
    if applied is not None:
        skipped = run.skipped_steps or 0.0
        scale = run.last(MetricName.LOSS_SCALE_LOG2)
        at = "" if scale is None else f"; the loss scale was 2^{scale:g} at the end"
        yield f"{applied:.0f} optimizer steps applied, {skipped:.0f} skipped{at}"
    share = run.reports.audit_share
    if share is not None:
        yield f"audit: {share:.1%} of the FLOPs of the first batch in this precision"
    if run.speed is not None:
        yield f"{spread_text(run.speed)} samples/s without the first report"
    yield from changes_of(run)
    folder = Path(run.name)
    if not folder.is_dir():
        return
    checkpoints = sorted(path.name for path in folder.glob("checkpoints/batch-*"))
    names = ", ".join(checkpoints) or "none"
    yield f"checkpoints: {names}, in {folder / 'checkpoints'}"
    yield f"all curves: tensorboard --logdir {folder / 'tensorboard'}"
    yield f"the log: {folder / 'log.txt'}"


def curves_of(run: Run) -> list[Curve]:
    """The training loss, the validation metric and the loss scale, where there are."""
    metric = metric_of(run)
    curves = [
        ("training loss", run.trained_curve(MetricName.LOSS)),
        (metric, run.curve(metric)),
        ("log₂ of the loss scale", run.trained_curve(MetricName.LOSS_SCALE_LOG2)),
    ]
    return [(title, points) for title, points in curves if points]


def _draw(curves: Sequence[Curve]) -> Figure:
    with matplotlib.rc_context(STYLE):
        count = max(len(curves), 1)
        figure = Figure(figsize=(10.0, 3.0), layout="constrained")
        panels = figure.subplots(1, count, squeeze=False)[0]
        for axes, (title, points) in zip(panels, curves, strict=False):
            axes.plot(*zip(*points, strict=True), "o-", color=BLUE, markersize=3)
            axes.set_title(title)
            axes.set_xlabel("batches")
        return figure


def _validations(run: Run) -> Table:
    """A row per validation; one without metrics if there was none."""
    rows = []
    for report in run.reports.validations:
        row: Row = [("batches", report.batches)]
        row += [(name, report.metrics.get(name)) for name in run.metrics]
        rows.append(row)
    return rows or [[("batches", run.trained_batches)]]
