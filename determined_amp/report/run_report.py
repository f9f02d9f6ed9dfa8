"""The report on one run: how it ended, its curves, and where its files are."""

from __future__ import annotations

from pathlib import Path

from determined_amp.amp.metric_names import MetricName
from determined_amp.report import Sentences
from determined_amp.report.page import (
    Panel,
    Row,
    Table,
    Written,
    spread_text,
    write_page,
)
from determined_amp.report.precision_runs import counted
from determined_amp.runs.folder import complete_checkpoints
from determined_amp.runs.run import (
    FAULTS,
    PRECISION,
    Run,
    RunState,
    curve_of,
    metric_of,
)

_CAPTION = "A dot per report: the training loss, a validation metric, the loss scale."


def write_run_report(run: Run, folder: Path) -> Written:
    """Write the report on a run into a folder.

    Raises:
        UserError: if it cannot be written.
    """
    panels = curves_of(run)
    curves = {panel.title: panel.dots for panel in panels}
    return write_page(
        folder,
        "report",
        answer=_answer(run),
        yaml="",
        sentences=list(run_sentences(run)),
        panels=panels,
        caption=_CAPTION,
        table=_validations(run),
        origin=f"{run.name}; on {run.machine.device}, torch {run.machine.torch}.",
        record={"settings": run.settings, "curves": curves},
    )


def _answer(run: Run) -> str:
    """How the run ended, and its last metric, or what `check` found."""
    precision = run.settings.get(PRECISION, "the trial's own precision")
    if run.reason:
        return f"{precision}: {run.state.value}: {run.reason}"
    end = f"{precision}: {run.state.value}, {run.training.batches} batches"
    if FAULTS in run.metrics:
        return f"check found {counted(int(run.metrics[FAULTS]), 'fault')}"
    metric = metric_of([run])
    value = run.metrics.get(metric)
    return end if value is None else f"{end}: {metric} {value:.4g}"


def run_sentences(run: Run) -> Sentences:
    """What was measured and changed, and where the files are."""
    applied = run.last(MetricName.APPLIED_STEPS)
    if applied is not None:
        skipped = run.skipped_steps or 0.0
        scale = run.last(MetricName.LOSS_SCALE_LOG2)
        last = "" if scale is None else f"; the last loss scale was 2^{scale:g}"
        yield f"{applied:.0f} optimizer steps applied, {skipped:.0f} skipped{last}"
    share = run.audit_share
    if share is not None:
        yield f"audit: {share:.1%} of the FLOPs of the first batch in this precision"
    if run.speed is not None:
        yield f"{spread_text(run.speed)} samples/s without the first report"
    yield from run.changes
    folder = Path(run.name)
    if not folder.is_dir():
        return
    saved = [path.name for path in complete_checkpoints(folder / "checkpoints")]
    yield f"checkpoints: {', '.join(saved) or 'none'}, in {folder / 'checkpoints'}"
    if run.state in (RunState.KILLED, RunState.STOPPED):
        go_on = "there is nothing to go on from: start the run anew"
        if saved:
            go_on = f"go on from {saved[-1]}: det-amp train --resume {folder}"
        yield go_on
    yield f"all curves: tensorboard --logdir {folder / 'tensorboard'}"
    yield f"the log: {folder / 'log.txt'}"


def curves_of(run: Run) -> list[Panel]:
    """The training loss, the validation metric and the loss scale that a run has."""
    metric = metric_of([run])
    curves = {
        "training loss": curve_of(run.trained, MetricName.LOSS),
        metric: curve_of(run.validations, metric),
        "log₂ of the loss scale": curve_of(run.trained, MetricName.LOSS_SCALE_LOG2),
    }
    return [Panel(title, "batches", dots) for title, dots in curves.items() if dots]


def _validations(run: Run) -> Table:
    """A row per validation; without one, a row of the last training report."""
    rows = []
    for report in run.validations:
        row: Row = [("batches", report.batches)]
        row += [(name, report.metrics.get(name)) for name in run.metrics]
        rows.append(row)
    trained = [("training loss", run.training.metrics.get(MetricName.LOSS))]
    return rows or [[("batches", run.training.batches), *trained]]
