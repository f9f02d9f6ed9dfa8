"""The terminal output of a search: a line per trial, and at the end what to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from determined_amp.experiment.dotted import nested
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.finder.score import worth_of_best
from determined_amp.runs.run import Run, RunState
from determined_amp.search.search_folder import STUDY_FILE, Search, result
from determined_amp.search.search_plan import SearchPlan


class SearchDisplay:
    """Shows one search."""

    def __init__(self, console: Console, plan: SearchPlan, folder: Path) -> None:
        self._console = console
        self._plan = plan
        self._folder = folder
        self._metric = plan.settings.metric

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
        """Print the line of a trial that has ended."""
        values = "  ".join(f"{name} {_short(value)}" for name, value in run.hparams.items())
        value = result(run, self._metric)
        end = f"{self._metric} {_short(value)}"
        if run.state is RunState.PRUNED:
            end += f", stopped after {run.batches} batches"
        elif value is None:
            end = f"{run.state.value}: {run.reason}"
        self._say(f"trial {run.number:>3}  {values}  {end}")

    def close(self, search: Search, *, stopped: bool, failed: bool) -> None:
        """Print how a search ended, and the best values as YAML.

        Args:
            search: The search.
            stopped: Whether a signal stopped it.
            failed: Whether it has no result, or ended because trials failed for the same reason.
        """
        ranked, lost = search.ranked(), search.failed()
        state = "failed" if failed else "stopped" if stopped else "completed"
        self._say(f"{self._plan.search.get('name')}: {state}")
        if self._plan.compares:
            self._say(f"compare: python -m determined_amp report precision {self._folder}")
        elif ranked and all(run.overflow for run in ranked):
            self._say("every scale of this search overflows: search smaller ones")
        elif ranked and ranked[0].hparams:
            self._show_best(ranked, stopped=stopped)
        if lost:
            self._say(
                f"{len(lost)} of {len(search.runs)} trials failed; trial {lost[0].number}: "
                f"{lost[0].reason}"
            )
        if stopped:
            self._say(f"go on: python -m determined_amp search --resume {self._folder}")
        self._say(f"study: sqlite:///{self._folder / STUDY_FILE}")

    def _show_best(self, ranked: list[Run], *, stopped: bool) -> None:
        lost = [(run.scale_log2, run.metrics.get("steps_lost")) for run in ranked]
        worth = worth_of_best(self._metric, lost)
        if worth is not None:
            self._say(worth)
        self._say(f"best so far, of trial {ranked[0].number}:" if stopped else "best:")
        self._say(dump_yaml({"hyperparameters": nested(ranked[0].hparams)}).rstrip())

    def _say(self, text: str) -> None:
        say(self._console, text)


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
