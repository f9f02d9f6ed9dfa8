"""The terminal output of a local run: a progress bar, a line per report, a table at the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from determined_amp.amp.metric_names import AuditMetricName, MetricName
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.training import LENGTH_UNITS
from determined_amp.local.checkpoint_storage import complete_checkpoints
from determined_amp.local.processes import StopOnSignal
from determined_amp.local.run_listener import RunListener
from determined_amp.runs.folder import RunFolder
from determined_amp.runs.run import Report, Reports, of_optimizers

# The metrics of a report line, in this order, with their formats.
_SHOWN = {
    MetricName.LOSS: "loss {:.4f}",
    MetricName.GRAD_NORM: "norm {:.3g}",
    MetricName.LOSS_SCALE_LOG2: "scale 2^{:.3g}",
    MetricName.SKIPPED_STEPS: "skipped {:.0f}",
    MetricName.SAMPLES_PER_SECOND: "{:,.0f} samples/s",
    "validation_loss": "loss {:.4f}",
    "validation_accuracy": "accuracy {:.4f}",
}

# The rows of the table at the end: title, metric, format.
_CLOSING = (
    ("validation accuracy", "validation_accuracy", "{:.4f}"),
    ("validation loss", "validation_loss", "{:.4f}"),
    ("training loss", MetricName.LOSS, "{:.4f}"),
    ("products in precision", AuditMetricName.SHARE, "{:.1%}"),
    ("loss scale", MetricName.LOSS_SCALE_LOG2, "2^{:g}"),
    ("applied steps", MetricName.APPLIED_STEPS, "{:.0f}"),
    ("skipped steps", MetricName.SKIPPED_STEPS, "{:.0f}"),
    ("samples per second", MetricName.SAMPLES_PER_SECOND, "{:,.0f}"),
    ("peak memory (MiB)", MetricName.PEAK_MEMORY_MIB, "{:,.0f}"),
)

# One line or table shows at most this many metrics of the trial's own.
_MOST_OTHERS = 12

# How the names of our other metrics begin.
_EXPLAIN = ("watch_", MetricName.SKIPPED_STEPS)


def _progress_bar(console: Console) -> Progress:
    """A bar with the count of batches, the elapsed and the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class Display(RunListener):
    """Shows one run."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self._title = experiment.name
        self._metric = experiment.platform.searcher.metric
        self._precision = experiment.precision
        self._length = experiment.key_of("max_length")
        self._console = console
        self._latest: dict[str, dict[str, float]] = {"validation": {}, "training": {}}
        self._reports = Reports()
        # The batches of a resume that has nothing left to train.
        self._all_trained: int | None = None
        self._progress = _progress_bar(console)

    def on_start(self, folder: RunFolder, stop: StopOnSignal) -> None:
        self._folder = folder.shown
        if not self._console.quiet:
            stop.answer = (
                "stopping at the next report, with a checkpoint; Ctrl-C once more stops at once"
            )

    def on_precision(self, precision: str) -> None:
        """Show it, and keep it for the table."""
        self._precision = precision
        self._say(f"{self._title}: {precision}")

    def on_training(self, first_batch: int, total_batches: int, epoch_batches: int) -> None:
        """Show a bar until the run ends."""
        self._all_trained = first_batch if first_batch == total_batches else None
        self._progress.add_task("training", completed=first_batch, total=total_batches)
        self._progress.start()

    def on_status(self, status: str) -> None:
        """Show the status beside the bar."""
        self._update(description=status)

    def on_report(self, line: Mapping[str, Any]) -> None:
        """Show one report as a line and move the bar."""
        group, batches = line["group"], line["batches"]
        numbers = {name: value for name, value in line.items() if isinstance(value, (int, float))}
        self._latest[group].update(numbers)
        if group == "training":
            self._reports.add(group, Report(batches, numbers))
        self._update(completed=batches)
        shown = [text.format(numbers[name]) for name, text in _SHOWN.items() if name in numbers]
        others = self._others(numbers, _SHOWN)
        shown += [f"{name} {numbers[name]:.4g}" for name in others]
        text = f"{group[:5]} {batches:>6}  " + "  ".join(shown)
        self._console.print(text, highlight=False, markup=False)

    def on_end(self, error: BaseException | None, *, stopped: bool) -> None:
        """Remove the bar; after a run without an error, show the table."""
        if self._progress.live.is_started:
            self._progress.stop()
        if error is None:
            self._show_table("stopped" if stopped else "completed")
        interrupted = isinstance(error, KeyboardInterrupt)
        if stopped or (interrupted and complete_checkpoints(self._folder / "checkpoints")):
            self._say(f"go on: python -m determined_amp train --resume {self._folder}")

    def _show_table(self, state: str) -> None:
        training, validation = self._latest["training"], self._latest["validation"]
        if self._all_trained is not None and not (training or validation):
            text = (
                f"{self._title}: {self._all_trained} batches are trained, which is all that it "
                f"asks for; to go on, give it a larger {self._length}"
            )
            self._say(text)
            return
        table = Table(
            title=escape(f"{self._title}: {state}"), title_justify="left", show_header=False
        )
        table.add_column(style="bold")
        table.add_column(justify="right")
        # A metric of both is that of the training, but the searcher's is that of the validation.
        numbers = {**validation, **training}
        if self._metric in validation:
            numbers[self._metric] = validation[self._metric]
        for name in (MetricName.APPLIED_STEPS, MetricName.SKIPPED_STEPS):
            steps = of_optimizers(training, name)
            if steps is not None:
                numbers[name] = steps
        if self._reports.speed is not None:  # the last report is as good as its few batches
            numbers[MetricName.SAMPLES_PER_SECOND] = self._reports.speed.median
        table.add_row("precision", self._precision)
        for title, name, text in _CLOSING:
            if name in numbers:
                table.add_row(title, text.format(numbers[name]))
        for name in self._others(numbers, [name for _, name, _ in _CLOSING]):
            table.add_row(escape(name), f"{numbers[name]:.4g}")
        self._console.print(table)
        self._say(f"run folder: {self._folder}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _others(self, numbers: Mapping[str, float], known: Collection[str]) -> list[str]:
        """The trial's own metrics, that of the searcher first."""
        ours = {*known, *LENGTH_UNITS}
        own = [name for name in numbers if name not in ours and not name.startswith(_EXPLAIN)]
        own.sort(key=lambda name: name != self._metric)
        return own[:_MOST_OTHERS]

    def _update(self, **changes: Any) -> None:
        for task in self._progress.task_ids:
            self._progress.update(task, **changes)
