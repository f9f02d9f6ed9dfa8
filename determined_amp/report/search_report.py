"""The report on a search: its best trial, and what each trial measured."""

from __future__ import annotations

import math
from pathlib import Path

from determined_amp.amp.errors import UserError
from determined_amp.amp.metric_names import MetricName
from determined_amp.experiment.dotted import flat
from determined_amp.report import Sentences
from determined_amp.report.page import (
    Panel,
    Row,
    Table,
    Written,
    write_page,
)
from determined_amp.runs.run import RunState, shown_setting
from determined_amp.search.search_display import best_of, failed_trials
from determined_amp.search.search_folder import Search

_CAPTION = "A dot per trial: the metric that ranks the trials, by what was searched."

# The states of trials that may still get a result.
_OPEN = (RunState.RUNNING, RunState.KILLED, RunState.STOPPED)

# A picture shows at most this many hyperparameters, each in its own panel.
_MOST_PANELS = 3


def write_search_report(search: Search, folder: Path) -> Written:
    """Write the report on a search into a folder.

    Raises:
        UserError: if it cannot be written, or no trial has begun.
    """
    if not search.runs:
        found = "; ".join([f"{search.origin}: has no trials yet", *search.notes])
        raise UserError(f"{found}; draw it when the first has ended")
    answer, yaml = f"no trial reported {search.metric} yet", ""
    if search.ranked():
        answer, yaml = best_of(search)
    return write_page(
        folder,
        "report",
        answer=answer,
        yaml=yaml,
        sentences=list(_sentences(search)),
        panels=panels_of(search)[:_MOST_PANELS],
        caption=_CAPTION,
        table=_trials(search),
        origin=_origin(search),
        record={"metric": search.metric},
    )


def _sentences(search: Search) -> Sentences:
    if search.lost():
        is_local = Path(search.origin).is_dir()
        platform = "" if is_local else ", although the platform may name one as best"
        yield f"{failed_trials(search)} (they do not count{platform})"
    waiting = [run for run in search.runs if run.state in _OPEN]
    if waiting:
        begun = f"{len(waiting)} of {len(search.runs)} trials that began"
        yield f"{begun} have not ended: the answer may change"
    yield from search.notes


def panels_of(search: Search) -> list[Panel]:
    """A panel for each searched number, with a dot for each trial that has a result."""
    spaces = flat(search.config.get("hyperparameters") or {})
    panels = []
    for name in search.searched:
        is_log = spaces[name]["type"] == "log"
        dots = []
        for run in search.ranked():
            value = run.hparams.get(name)
            if isinstance(value, (int, float)):
                x = math.log2(value) if is_log else float(value)
                dots.append((x, search.value(run) or 0.0))
        if dots:
            label = f"log₂ of {name}" if is_log else name
            panels.append(Panel(search.metric, label, dots, line=""))
    return panels


def _trials(search: Search) -> Table:
    """A row for each trial: the best first, then those without a result."""
    ranked = search.ranked()
    others = [run for run in search.runs if run not in ranked]
    reported = dict.fromkeys(name for run in search.runs for name in run.metrics)
    rows = []
    for run in (*ranked, *others):
        row: Row = [("trial", run.number)]
        for name in search.searched:
            row.append((name, shown_setting(name, run.hparams.get(name))))
        row += [("state", run.state.value), ("batches", run.validated.batches)]
        row.append((search.metric, search.value(run)))
        names = [name for name in reported if name != search.metric]
        row += [(name, run.metrics.get(name)) for name in names]
        row.append((MetricName.SKIPPED_STEPS, run.skipped_steps))
        rows.append(row)
    return rows


def _origin(search: Search) -> str:
    """The trials, their machine, and the date."""
    first = search.runs[0]
    trials = f"{len(search.runs)} trials of {search.name} ({search.origin})"
    machine = f"on {first.machine.device}, torch {first.machine.torch}"
    return f"{trials}; {machine}, {first.date or 'date unknown'}."
