"""The terminal output of a search: a bar with the best trial, a line per trial, a final table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from determined_amp.amp.metric_names import MetricName
from determined_amp.experiment.dotted import nested
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.finder.score import worth_of_best
from determined_amp.local.display import progress_bar
from determined_amp.runs.folder import read_trials
from determined_amp.runs.run import Run, RunState
from determined_amp.search.search_folder import STUDY_FILE, Search, result
from determined_amp.search.search_plan import SearchPlan

# Columns next to the searcher's metric, shown if a trial has them: name, title, format.
_DIAGNOSIS = (
    ("init_scale_log2", "scale", "2^{:g}"),
    ("steps_lost", "steps lost", "{:.4g}"),
    ("gradient_error", "error", "{:.1e}"),
    ("backward_headroom_bits", "headroom", "{:.2f}"),
    ("flushed_share", "flushed", "{:.2%}"),
    (MetricName.SKIPPED_STEPS, "skipped", "{:.0f}"),
)
_ENDED = (RunState.COMPLETED, RunState.PRUNED, RunState.FAILED, RunState.INVALID)
_MOST_ROWS = 30


class SearchDisplay:
    """Shows one search."""

    def __init__(self, console: Console, plan: SearchPlan, folder: Path) -> None:
        self._console = console
        self._plan = plan
        self._folder = folder
        self._metric = plan.settings.metric
        self._compares = plan.compares
        self._ended: dict[int, Run] = {}
        self._say = partial(say, console)
        self._progress = progress_bar(console, "trials")

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show the bar inside this block."""
        before = (run for run in read_trials(self._folder, []) if run.state in _ENDED)
        self._ended = {run.number: run for run in before}
        total, done = len(self._plan.points), len(self._ended)
        self._task = self._progress.add_task("starting", total=total, completed=done)
        with self._progress:
            yield

    def warn_of_sharing(self, workers: int) -> None:
        """Warn that concurrent trials slow each other down."""
        self._say(
            f"{workers} trials at a time share the processors, and a GPU if there are fewer: "
            "their accuracies can be compared, their speeds cannot"
        )

    def lost(self, number: int, status: int | None) -> None:
        """Print that the process of a trial died."""
        self._say(f"trial {number:>3}  its process died with status {status}")

    def ended(self, run: Run) -> None:
        """Show a trial that has ended."""
        self._say(self._line(run))
        self._ended[run.number] = run
        description = "comparing" if self._compares else "searching"
        ranked = Search("", tuple(self._ended.values()), self._plan.search).ranked()
        if ranked and not self._compares:
            best = ranked[0]
            value = best.metrics[self._metric]
            description = f"best {self._metric} {value:.5g} (trial {best.number})"
        self._progress.update(self._task, completed=len(self._ended), description=description)

    def close(self, search: Search, *, stopped: bool, failed: bool) -> None:
        """Show the table of a search that has ended, and the best values as YAML.

        Args:
            search: The search.
            stopped: Whether a signal stopped it.
            failed: Whether it has no result, or ended because trials failed for the same reason.
        """
        ranked = search.ranked()
        state = "failed" if failed else "stopped" if stopped else "completed"
        title = f"{self._plan.search.get('name')}: {state}"
        self._console.print(self._table(search, ranked, title))
        if self._compares:
            self._say(f"compare: python -m determined_amp report precision {self._folder}")
        elif ranked and all(run.overflow for run in ranked):
            self._say("every scale of this search overflows: search smaller ones")
        elif ranked and ranked[0].hparams:
            worth = worth_of_best(
                self._metric, [(run.scale_log2, run.metrics.get("steps_lost")) for run in ranked]
            )
            if worth is not None:
                self._say(worth)
            self._say(f"best so far, of trial {ranked[0].number}:" if stopped else "best:")
            lines = dump_yaml({"hyperparameters": nested(ranked[0].hparams)})
            self._say(lines.rstrip())
        lost = search.failed()
        if lost:
            self._say(
                f"{len(lost)} of {len(search.runs)} trials failed; trial {lost[0].number}: "
                f"{lost[0].reason}"
            )
        if stopped:
            self._say(f"go on: python -m determined_amp search --resume {self._folder}")
        self._say(f"study: sqlite:///{self._folder / STUDY_FILE}")

    def _line(self, run: Run) -> str:
        values = "  ".join(f"{name} {_short(value)}" for name, value in run.hparams.items())
        value = result(run, self._metric)
        end = f"{self._metric} {_short(value)}"
        if run.state is RunState.PRUNED:
            end += f", stopped after {run.batches} batches"
        elif value is None:
            end = f"{run.state.value}: {run.reason}"
        return f"trial {run.number:>3}  {values}  {end}"

    def _table(self, search: Search, ranked: list[Run], title: str) -> Table:
        """A row per trial, best first, with the scale after rounding to a power of two.

        The column `after` has the batches of the last validation, or why there is no value. The
        trials of a comparison are sorted by number, because their ranking depends on the seeds.
        """
        valueless = [run for run in search.runs if result(run, self._metric) is None]
        rows = [*ranked, *valueless]
        if self._compares:
            rows.sort(key=lambda run: run.number)
        numbers = {run.number: _numbers(run) for run in rows}
        shown = [row for row in _DIAGNOSIS if any(row[0] in known for known in numbers.values())]
        params = [axis.name for axis in self._plan.space.axes]
        if any(name == "init_scale_log2" for name, *_ in shown):
            params = [name for name in params if name != "amp.init_scale"]
        table = Table(
            title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        titles = [name.rpartition(".")[2] for name in params]
        for column in ("trial", *titles, self._metric, *(title for _, title, _ in shown), "after"):
            table.add_column(column, justify="right", overflow="fold")
        for run in rows[:_MOST_ROWS]:
            value, known = result(run, self._metric), numbers[run.number]
            table.add_row(
                str(run.number),
                *(escape(_short(run.hparams.get(name))) for name in params),
                _short(value),
                *(text.format(known[name]) if name in known else "" for name, _, text in shown),
                run.state.value if value is None else str(run.batches),
            )
        if len(rows) > _MOST_ROWS:
            table.caption = f"{len(rows) - _MOST_ROWS} more in the folder"
        return table


def _numbers(run: Run) -> dict[str, float]:
    """The last validation metrics, and the skipped steps of the training."""
    skipped = run.last(MetricName.SKIPPED_STEPS)
    trained = {} if skipped is None else {MetricName.SKIPPED_STEPS: skipped}
    return {**trained, **run.metrics}


def say(console: Console, text: str) -> None:
    """Print text as it is."""
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def minutes(seconds: float) -> str:
    """A time in words."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" + (f" {whole % 60:02d} s" if whole % 60 else "")


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    return str(value)
