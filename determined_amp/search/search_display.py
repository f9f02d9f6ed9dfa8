"""What a search prints: a line per trial, and at the end what to use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from determined_amp.amp.plain_data import Values
from determined_amp.amp.settings import yaml_lines
from determined_amp.experiment.dotted import put_by_name
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.runs.run import Run, RunState
from determined_amp.search.search_folder import STUDY_FILE, Search, result, workers_of
from determined_amp.search.task import Topic


def line_of_a_trial(run: Run, metric: str) -> str:
    """The line of a trial that has ended."""
    values = "  ".join(f"{name} {_short(value)}" for name, value in run.hparams.items())
    value = result(run, metric)
    end = f"{metric} {_short(value)}"
    if run.state is RunState.PRUNED:
        end += f", stopped after {run.batches} batches"
    elif value is None:
        end = f"{run.state.value}: {run.reason}"
    return f"trial {run.number:>3}  {values}  {end}"


def closing_lines(search: Search, folder: Path, *, stopped: bool) -> Iterator[str]:
    """How a search ended, and the best values as YAML.

    Args:
        search: The search.
        folder: Its folder.
        stopped: Whether a signal stopped it.
    """
    ranked, lost = search.ranked(), search.failed()
    state = "completed" if ranked else "failed"
    yield f"{search.name}: {'stopped' if stopped else state}"
    if Topic.of(search.config) is Topic.PRECISIONS:
        yield f"compare: det-amp report precision {folder}"
    elif ranked and all(run.overflow for run in ranked):
        yield "every scale of this search overflows: search smaller ones"
    elif ranked and ranked[0].hparams:
        yield from _best(search, ranked)
    if lost:
        first = lost[0]
        yield (
            f"{len(lost)} of {len(search.runs)} trials failed; trial {first.number}: "
            f"{first.reason}"
        )
    if stopped:
        at_a_time = workers_of(search.config)
        workers = f" --workers {at_a_time}" if at_a_time > 1 else ""
        yield f"go on: det-amp search --resume {folder}{workers}"
    yield f"study: sqlite:///{folder / STUDY_FILE}"


def _best(search: Search, ranked: list[Run]) -> Iterator[str]:
    advice = search.scale_advice
    if advice is not None:
        yield advice.text
        if advice.scale_log2 is not None:
            yield yaml_lines({"init_scale": 2.0**advice.scale_log2})
        return
    yield f"best, of trial {ranked[0].number}:"
    best: Values = {}
    put_by_name(best, ranked[0].hparams, search.config["hyperparameters"])
    yield dump_yaml({"hyperparameters": best}).rstrip()


def minutes(seconds: float) -> str:
    """A time in words."""
    whole, rest = divmod(round(seconds), 60)
    if whole < 2:
        return f"{round(seconds)} s"
    return f"{whole} min {rest:02d} s" if rest else f"{whole} min"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
