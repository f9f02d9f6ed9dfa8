"""The terminal output of a search: a bar with the best trial, a line per trial, a final table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from determined_amp.amp.metrics import MetricName
from determined_amp.experiment.dotted import flat
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.finder.score import worth_of_best
from determined_amp.local.display import progress_bar
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study_file import FILE_NAME, SearchStudy, SearchTrial

# Columns next to the searcher's metric, shown if a trial has them: name, title, format.
_DIAGNOSIS = (
    ("init_scale_log2", "scale", "2^{:g}"),
    ("steps_lost", "steps lost", "{:.4g}"),
    ("gradient_error", "error", "{:.1e}"),
    ("backward_headroom_bits", "headroom", "{:.2f}"),
    ("flushed_share", "flushed", "{:.2%}"),
    (MetricName.SKIPPED_STEPS, "skipped", "{:.0f}"),
)
_ENDED = ("complete", "stopped", "failed")
_MOST_ROWS = 30


class SearchDisplay:
    """Shows one search.

    Args:
        console: Where to print.
        plan: The search.
        folder: The search folder.
    """

    def __init__(self, console: Console, plan: SearchPlan, folder: Path) -> None:
        self._console = console
        self._plan = plan
        self._folder = folder
        self._metric = plan.settings.metric
        self._compares = plan.compares
        self._shown: set[int] | None = None
        self._progress = progress_bar(console, "trials")

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show the bar inside this block."""
        self._task = self._progress.add_task("starting", total=self._plan.total)
        with self._progress:
            yield

    def warn_of_sharing(self, workers: int) -> None:
        """Warn that concurrent trials slow each other down."""
        self._print(
            f"{workers} trials at a time share the processors, and a GPU if there are fewer: "
            "their accuracies can be compared, their speeds cannot"
        )

    def lost(self, number: int, status: int | None) -> None:
        """Print that the process of a trial died."""
        self._print(f"trial {number:>3}  its process died with status {status}")

    def update(self, study: SearchStudy) -> None:
        """Show the trials that have ended since the last time."""
        ended = [trial for trial in study.trials if trial.state in _ENDED]
        before, self._shown = self._shown or set(), {trial.number for trial in ended}
        for trial in ended:
            if trial.number not in before:
                self._print(self._line(trial))
        description = "comparing" if self._compares else "searching"
        ranked = study.ranked()
        if ranked and not self._compares:
            best = ranked[0]
            description = f"best {self._metric} {best.value:.5g} (trial {best.number})"
        done = min(len(ended), self._plan.total)
        self._progress.update(self._task, completed=done, description=description)

    def close(self, study: SearchStudy, *, stopped: bool, failed: bool) -> None:
        """Show the table of a search that has ended, and the best values as YAML.

        Args:
            study: The search.
            stopped: Whether a signal stopped it.
            failed: Whether it has no result, or ended because trials failed for the same reason.
        """
        ranked = study.ranked()
        state = "failed" if failed else "stopped" if stopped else "completed"
        self._console.print(self._table(study, ranked, f"{self._plan.search.get('name')}: {state}"))
        if self._compares:
            self._print(f"compare: python -m determined_amp report precision {self._folder}")
        elif ranked and all(trial.metrics.get("overflow") for trial in ranked):
            self._print("every scale of this search overflows: search smaller ones")
        elif ranked and ranked[0].used:
            worth = worth_of_best(self._metric, [trial.metrics for trial in ranked])
            if worth is not None:
                self._print(worth)
            self._print(f"best so far, of trial {ranked[0].number}:" if stopped else "best:")
            lines = dump_yaml({"hyperparameters": dict(ranked[0].used)})
            self._print(lines.rstrip())
        lost = study.failed()
        if lost:
            self._print(
                f"{len(lost)} of {len(study.trials)} trials failed; trial {lost[0].number}: "
                f"{_first_line(lost[0].reason)}"
            )
        if stopped:
            self._print(f"go on: python -m determined_amp search --resume {self._folder}")
        self._print(f"study: sqlite:///{self._folder / FILE_NAME}")

    def _line(self, trial: SearchTrial) -> str:
        values = "  ".join(f"{name} {_short(value)}" for name, value in flat(trial.used).items())
        if trial.value is None:
            state = "invalid" if trial.invalid else trial.state
            result = f"{state}: {_first_line(trial.reason)}"
        else:
            result = f"{self._metric} {_short(trial.value)}"
        if trial.state == "stopped":
            result += f", stopped after {trial.history[-1][0]} batches"
        return f"trial {trial.number:>3}  {values}  {result}"

    def _table(self, study: SearchStudy, ranked: list[SearchTrial], title: str) -> Table:
        """A row per trial, best first, with the scale after rounding to a power of two.

        The column `after` has the batches of the last validation, or why there is no value. The
        trials of a comparison are sorted by number, because their ranking depends on the seeds.
        """
        valueless = [trial for trial in study.trials if trial.value is None]
        rows = [*ranked, *(trial for trial in valueless if trial.state != "waiting")]
        if self._compares:
            rows.sort(key=lambda trial: trial.number)
        numbers = [dict(trial.metrics) for trial in rows]
        skipped = MetricName.SKIPPED_STEPS
        for found, trial in zip(numbers, rows, strict=True):
            if skipped in trial.training:
                found.setdefault(skipped, trial.training[skipped])
        shown = [row for row in _DIAGNOSIS if any(row[0] in found for found in numbers)]
        params = [axis.name for axis in self._plan.space.axes]
        if any(name == "init_scale_log2" for name, *_ in shown):
            params = [name for name in params if name != "amp.init_scale"]
        table = Table(
            title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        titles = [name.rpartition(".")[2] for name in params]
        for column in ("trial", *titles, self._metric, *(title for _, title, _ in shown), "after"):
            table.add_column(column, justify="right", overflow="fold")
        for trial, found in list(zip(rows, numbers, strict=True))[:_MOST_ROWS]:
            table.add_row(
                str(trial.number),
                *(escape(_short(trial.params.get(name))) for name in params),
                _short(trial.value),
                *(text.format(found[name]) if name in found else "" for name, _, text in shown),
                _after(trial),
            )
        if len(rows) > _MOST_ROWS:
            table.caption = f"{len(rows) - _MOST_ROWS} more in the study"
        return table

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def _after(trial: SearchTrial) -> str:
    if trial.value is not None:
        return f"{trial.history[-1][0]}"
    return "invalid" if trial.invalid else trial.state


def _first_line(reason: str | None) -> str:
    return (reason or "").partition("\n")[0]


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    return str(value)
