"""Makes the lines that a search prints: one per trial, and the closing lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import yaml_lines
from determined_amp.experiment.dotted import put
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.runs.folder import STUDY_FILE
from determined_amp.runs.run import Run, RunState, shown_setting
from determined_amp.search.search_folder import Search, workers_of


def line_of_a_trial(search: Search, run: Run) -> str:
    """The line on a trial that has ended."""
    values = "  ".join(
        f"{name} {_short(shown_setting(name, value))}"
        for name, value in run.hparams.items()
    )
    value = search.value(run)
    end = f"{search.metric} {_short(value)}"
    if run.state is RunState.PRUNED:
        end += f", stopped after {run.validated.batches} batches"
    elif value is None:
        end = f"{run.state.value}: {run.reason}"
    return f"trial {run.number:>3}  {values}  {end}"


def closing_lines(search: Search, *, stopped: bool) -> Iterator[str]:
    """The lines that say how a search ended, its best values, and what to type next.

    Args:
        search: The search.
        stopped: Whether a signal stopped it.
    """
    ranked = search.ranked()
    state = "completed" if ranked else "failed"
    yield f"{search.name}: {'stopped' if stopped else state}"
    if search.compares:
        yield f"compare: det-amp report {search.origin}"
    elif ranked and search.searched:
        yield from filter(None, best_of(search))
    if search.lost():
        yield failed_trials(search)
    if stopped:
        at_a_time = workers_of(search.config)
        workers = f" --workers {at_a_time}" if at_a_time > 1 else ""
        yield f"go on: det-amp search --resume {search.origin}{workers}"
    yield f"study: sqlite:///{search.origin}/{STUDY_FILE}"


def best_of(search: Search) -> tuple[str, str]:
    """The result of a search in words, and lines of YAML to paste; may be empty."""
    ranked, advice = search.ranked(), search.scale_advice
    if all(run.metrics.get("overflow") for run in ranked):
        return "every scale of this search overflows: search smaller ones", ""
    if advice is not None:
        scale = advice.scale_log2
        paste = "" if scale is None else yaml_lines({"init_scale": 2.0**scale})
        return advice.text, paste
    first = ranked[0]
    best: Values = {}
    for name in search.searched:
        put(best, name.split("."), first.hparams.get(name))
    value = _short(search.value(first))
    paste = dump_yaml({"hyperparameters": best}).rstrip() if best else ""
    return f"best: trial {first.number}, with {search.metric} {value}", paste


def failed_trials(search: Search) -> str:
    """How many trials failed, and why the first one did."""
    failed = search.lost()
    first = failed[0]
    return (
        f"{len(failed)} of {len(search.runs)} trials failed; trial {first.number}: "
        f"{first.reason}"
    )


def minutes(seconds: float) -> str:
    """A number of seconds as text, such as `3 min 05 s`."""
    whole, rest = divmod(round(seconds), 60)
    if whole < 2:
        return f"{round(seconds)} s"
    return f"{whole} min {rest:02d} s" if rest else f"{whole} min"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
