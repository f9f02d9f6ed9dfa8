"""Shows a local run on the terminal: a progress bar, and a line per report."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress

from determined_amp.amp.metric_names import AuditMetricName, MetricName
from determined_amp.amp.plain_data import Values
from determined_amp.experiment.experiment import Experiment
from determined_amp.experiment.training import LENGTH_UNITS
from determined_amp.runs.folder import RunFolder, complete_checkpoints

# The metrics of a report line, in this order, with their formats.
_SHOWN = {
    MetricName.LOSS: "loss {:.4f}",
    MetricName.GRAD_NORM: "norm {:.3g}",
    MetricName.LOSS_SCALE_LOG2: "scale 2^{:.3g}",
    MetricName.SKIPPED_STEPS: "skipped {:.0f}",
    AuditMetricName.SHARE: "in precision {:.1%}",
    MetricName.SAMPLES_PER_SECOND: "{:,.0f} samples/s",
    "validation_loss": "loss {:.4f}",
    "validation_accuracy": "accuracy {:.4f}",
}

# One line shows at most this many metrics of the trial's own.
_MOST_OTHERS = 12

# The names of our metrics, and the beginnings of names that are not shown.
_OURS = {*_SHOWN, *LENGTH_UNITS}
_EXPLAIN = ("watch_", MetricName.SKIPPED_STEPS)


class Display:
    """Shows one run."""

    def __init__(
        self,
        experiment: Experiment,
        console: Console,
        folder: RunFolder,
    ) -> None:
        self._title = experiment.name
        self._length = experiment.key_of("max_length")
        self._console = console
        self._progress = Progress(
            console=console, transient=True, disable=console.quiet
        )
        self._folder = folder

    def show_precision(self, precision: str) -> None:
        """Show the precision, now and at the end."""
        self._precision = precision
        self._say(f"{self._title}: {precision}")

    def begin_training(self, first_batch: int, total_batches: int) -> None:
        """Show a bar until the run ends, and where the run begins."""
        at = f"batch {first_batch} of {total_batches}"
        if first_batch < total_batches:
            begins = "resumed from" if first_batch else "begins at"
            self._say(f"{self._title}: {begins} {at}")
        else:
            self._say(
                f"{self._title}: {first_batch} batches are trained, which is all that "
                f"it asks for; to go on, give it a larger {self._length}"
            )
        self._task = self._progress.add_task(
            "training", completed=first_batch, total=total_batches
        )
        self._progress.start()

    def report(self, line: Values) -> None:
        """Show one report as a line and move the bar."""
        group, batches = line["group"], line["batches"]
        self._progress.update(self._task, completed=batches)
        numbers = {n: v for n, v in line.items() if isinstance(v, (int, float))}
        own = [n for n in numbers if n not in _OURS and not n.startswith(_EXPLAIN)]
        shown = [
            _SHOWN[name].format(numbers[name]) for name in _SHOWN if name in numbers
        ]
        shown += [f"{name} {numbers[name]:.4g}" for name in own[:_MOST_OTHERS]]
        self._say(f"{group[:5]} {batches:>6}  " + "  ".join(shown))

    def end(self, error: BaseException | None, *, stopped: bool) -> None:
        """Remove the bar, and say where the run is."""
        if self._progress.live.is_started:
            self._progress.stop()
        shown = self._folder.shown
        if error is None:
            state = "stopped" if stopped else "completed"
            self._say(f"{self._title}: {state}; {self._precision}\nrun folder: {shown}")
        interrupted = isinstance(error, KeyboardInterrupt)
        if stopped or (interrupted and complete_checkpoints(self._folder.checkpoints)):
            self._say(f"go on: det-amp train --resume {shown}")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)
