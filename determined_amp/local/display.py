"""The terminal of a local run: a bar, a line per report, a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

# What a report line shows, in this order: name, and how its number is written.
_SHOWN = {
    "loss": "loss {:.4f}",
    "grad_norm": "norm {:.3g}",
    "loss_scale_log2": "scale 2^{:.3g}",
    "skipped_steps": "skipped {:.0f}",
    "samples_per_second": "{:,.0f} samples/s",
    "validation_loss": "loss {:.4f}",
    "validation_accuracy": "accuracy {:.4f}",
}

# The closing table: row title, metric, and how its number is written.
_CLOSING = (
    ("validation accuracy", "validation_accuracy", "{:.4f}"),
    ("validation loss", "validation_loss", "{:.4f}"),
    ("training loss", "loss", "{:.4f}"),
    ("products in precision", "audit_share", "{:.1%}"),
    ("loss scale", "loss_scale_log2", "2^{:g}"),
    ("applied steps", "applied_steps", "{:.0f}"),
    ("skipped steps", "skipped_steps", "{:.0f}"),
    ("samples per second", "samples_per_second", "{:,.0f}"),
    ("peak memory (MiB)", "peak_memory_mib", "{:,.0f}"),
)


class Display:
    """Shows one run.

    Args:
        title: What is running.
        console: Where to; None shows nothing, for the ranks that do not report.

    Attributes:
        console: The same.
    """

    def __init__(self, title: str, console: Console | None) -> None:
        self._title = title
        self.console = console or Console(quiet=True)
        self._latest: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )

    @contextmanager
    def bar(self, first_batch: int, total_batches: int) -> Iterator[None]:
        """Show a bar meanwhile."""
        self._progress.add_task("training", completed=first_batch, total=total_batches)
        with self._progress:
            yield

    def status(self, status: str) -> None:
        """Say beside the bar what the trial is doing."""
        self._update(description=status)

    def report(self, group: str, batches: int, metrics: Mapping[str, Any]) -> None:
        """Show one report as a line and move the bar."""
        self._latest.update(metrics)
        self._update(completed=batches)
        shown = [text.format(metrics[name]) for name, text in _SHOWN.items() if name in metrics]
        self.console.print(f"{group[:5]} {batches:>6}  " + "  ".join(shown), highlight=False)

    def close(self, state: str, folder: Path) -> None:
        """The table of a run that has ended."""
        table = Table(title=f"{self._title}: {state}", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        for title, name, text in _CLOSING:
            if name in self._latest:
                table.add_row(title, text.format(self._latest[name]))
        self.console.print(table)
        self.console.print(f"run folder: {folder}", soft_wrap=True, highlight=False)

    def _update(self, **changes: Any) -> None:
        for task in self._progress.task_ids:
            self._progress.update(task, **changes)
