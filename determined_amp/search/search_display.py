"""The terminal of a search: a bar with the best so far, a line per trial, a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich import box
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

from determined_amp.amp.metrics import MetricName
from determined_amp.search.search_plan import SearchPlan
from determined_amp.search.study_file import FILE_NAME, SearchStudy, SearchTrial
from determined_amp.search.trial_kind import TrialKind

# Beside the searcher's metric, if a trial has them: name, title, and how the number is written.
_DIAGNOSIS = (
    ("init_scale_log2", "scale", "2^{:g}"),
    ("gradient_error", "error", "{:.1e}"),
    ("backward_headroom_bits", "headroom", "{:.2f}"),
    ("halvings", "halvings", "{:.0f}"),
    ("flushed_share", "flushed", "{:.2%}"),
    (MetricName.SKIPPED_STEPS, "skipped", "{:.0f}"),
)
_ENDED = ("complete", "stopped", "failed")
_MOST_ROWS = 30


class SearchDisplay:
    """Shows one search.

    Args:
        console: Where.
        plan: The search.
        folder: Its folder.
    """

    def __init__(self, console: Console, plan: SearchPlan, folder: Path) -> None:
        self._console = console
        self._plan = plan
        self._folder = folder
        self._compares = plan.kind is TrialKind.COMPARE
        self._shown: set[int] | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("trials"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )

    @contextmanager
    def bar(self) -> Iterator[None]:
        """Show a bar meanwhile."""
        self._task = self._progress.add_task("starting", total=self._plan.total)
        with self._progress:
            yield

    def warn_of_sharing(self, workers: int) -> None:
        """Say what trials that run side by side do to each other's speed."""
        self._print(
            f"{workers} trials at a time share the processors, and a GPU if there are fewer: "
            "their accuracies can be compared, their speeds cannot"
        )

    def lost(self, number: int, status: int | None) -> None:
        """Say that the process of a trial died."""
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
            description = f"best {study.metric} {best.value:.5g} (trial {best.number})"
        done = min(len(ended), self._plan.total)
        self._progress.update(self._task, completed=done, description=description)

    def close(self, study: SearchStudy, *, stopped: bool) -> None:
        """The table of a search that has ended, and the best values as YAML."""
        ranked = study.ranked()
        state = "stopped" if stopped else "completed"
        self._console.print(self._table(study, ranked, f"{self._plan.search.get('name')}: {state}"))
        if self._compares:
            self._print(f"compare: python -m determined_amp report precision {self._folder}")
        elif ranked and ranked[0].metrics.get("overflow"):
            self._print("every scale of this search overflows: search smaller ones")
        elif ranked and ranked[0].used:
            self._print(f"best so far, of trial {ranked[0].number}:" if stopped else "best:")
            lines = yaml.safe_dump({"hyperparameters": dict(ranked[0].used)}, sort_keys=False)
            self._print(lines.rstrip())
        if stopped:
            self._print(f"go on: python -m determined_amp search --resume {self._folder}")
        self._print(f"study: sqlite:///{self._folder / FILE_NAME}")

    def _line(self, trial: SearchTrial) -> str:
        values = "  ".join(f"{name} {_short(value)}" for name, value in flat(trial.used).items())
        if trial.value is None:
            result = f"{trial.state}: {(trial.reason or '').partition(chr(10))[0]}"
        else:
            result = f"{self._plan.settings.metric} {_short(trial.value)}"
        if trial.state == "stopped":
            result += f", stopped after {trial.history[-1][0]} batches"
        return f"trial {trial.number:>3}  {values}  {result}"

    def _table(self, study: SearchStudy, ranked: list[SearchTrial], title: str) -> Table:
        """Best first, a scale as it was used; `after` is the batches, or why there is no value.

        Trials of a comparison stand in their order: the best of them is noise.
        """
        valueless = [trial for trial in study.trials if trial.value is None]
        rows = [*ranked, *(trial for trial in valueless if trial.state != "waiting")]
        if self._compares:
            rows.sort(key=lambda trial: trial.number)
        numbers = [{**_steps(trial), **trial.metrics} for trial in rows]
        shown = [row for row in _DIAGNOSIS if any(row[0] in found for found in numbers)]
        params = [axis.name for axis in self._plan.space.axes]
        if any(name == "init_scale_log2" for name, *_ in shown):
            params = [name for name in params if name != "amp.init_scale"]
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        titles = [name.rpartition(".")[2] for name in params]
        for column in ("trial", *titles, study.metric, *(title for _, title, _ in shown), "after"):
            table.add_column(column, justify="right", overflow="fold")
        for trial, found in list(zip(rows, numbers, strict=True))[:_MOST_ROWS]:
            table.add_row(
                str(trial.number),
                *(_short(trial.params.get(name)) for name in params),
                _short(trial.value),
                *(text.format(found[name]) if name in found else "" for name, _, text in shown),
                trial.state if trial.value is None else f"{trial.history[-1][0]}",
            )
        if len(rows) > _MOST_ROWS:
            table.caption = f"{len(rows) - _MOST_ROWS} more in the study"
        return table

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False, markup=False)


def _steps(trial: SearchTrial) -> dict[str, float]:
    """Of its training metrics, those that say what its loss scale cost."""
    return {
        name: value for name, value in trial.training.items() if name == MetricName.SKIPPED_STEPS
    }


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names of all leaves."""
    leaves: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    return str(value)
