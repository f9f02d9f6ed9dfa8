"""The folder of a search without a cluster, and what reads it; Optuna is not needed for that.

search.yaml    the search; its `max_concurrent_trials` is the number of workers
study.db       Optuna's study: the points, which of them wait, and the reported values
trials/0000    the run folder of trial 0, and so on, see `runs.folder`
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_amp.amp.errors import UserError
from determined_amp.amp.fields import ConfigError, read
from determined_amp.experiment.experiment import Searcher, read_yaml, searcher_of
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.finder.score import bits_from_default
from determined_amp.runs.folder import read_trials, write_whole
from determined_amp.runs.run import Run, RunState

SEARCH_FILE, STUDY_FILE = "search.yaml", "study.db"


class SearchFolderError(UserError):
    """A folder is not that of a search."""


@dataclass(frozen=True)
class LocalSearch:
    """A search without a cluster.

    Args:
        config: Its configuration.
        runs: The trials that have started, in the order of their numbers.
    """

    config: Mapping[str, Any]
    runs: tuple[Run, ...]

    def failed(self) -> list[Run]:
        """The failed trials, except those with hyperparameters that cannot train."""
        return [run for run in self.runs if run.state is RunState.FAILED]

    def ranked(self) -> list[Run]:
        """The trials with a result, best first; of equals those nearest to 2^16."""
        metric = str(searcher_of(self.config).metric)
        return ranked(self.config, (run for run in self.runs if result(run, metric) is not None))


def result(run: Run, metric: str) -> float | None:
    """The value of a trial that was trained to its end, or stopped early by its search."""
    value = run.metrics.get(metric)
    ended = run.state in (RunState.COMPLETED, RunState.PRUNED)
    return value if ended and value is not None and math.isfinite(value) else None


def ranked(config: Mapping[str, Any], runs: Iterable[Run]) -> list[Run]:
    """The runs with a finite value of the searcher's metric, best first.

    Of runs with equal values, those with a loss scale nearest to 2^16 come first.
    """
    searcher = searcher_of(config)
    return searcher.best_first(
        runs,
        lambda run: run.metrics.get(str(searcher.metric)),
        lambda run: bits_from_default(run.scale_log2),
    )


def is_search(path: Path) -> bool:
    """Whether `path` is the folder of a local search, or its `study.db`."""
    return path.name == STUDY_FILE or (path / STUDY_FILE).exists()


def write_config(folder: Path, config: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Write the configuration of a search that runs with this number of workers; return it."""
    searcher = dict(config["searcher"])
    if searcher.get("name") != "single":
        searcher["max_concurrent_trials"] = workers
    written = {**config, "searcher": searcher}
    write_whole(folder / SEARCH_FILE, dump_yaml(written))
    return written


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of the search in a folder.

    Raises:
        SearchFolderError: if the folder is not that of a search.
        ConfigError: if the configuration cannot be read.
    """
    missing = [name for name in (SEARCH_FILE, STUDY_FILE) if not (folder / name).is_file()]
    if missing:
        raise SearchFolderError(
            f"{folder / missing[0]}: there is no such file; allowed: the folder of a search by "
            "`python -m determined_amp search`"
        )
    config = dict(read_yaml(str(folder / SEARCH_FILE)))
    problems: list[str] = []
    read(Searcher, config.get("searcher"), "searcher", problems, strict=False)
    for section in ("searcher", "hyperparameters"):
        if not problems and not isinstance(config.get(section), Mapping):
            problems.append(f"{section}: missing, or no mapping of keys to values")
    if problems:
        raise ConfigError(str(folder / SEARCH_FILE), problems)
    return config


def workers_of(config: Mapping[str, Any]) -> int:
    """Number of trials that ran at the same time."""
    workers = config["searcher"].get("max_concurrent_trials")
    return workers if isinstance(workers, int) else 1


def read_local_search(folder: Path) -> LocalSearch:
    """The search in a folder, as far as it has come.

    Raises:
        SearchFolderError: if the folder is not that of a search.
        ConfigError: if its configuration cannot be read.
        RunError: if the record of a trial is damaged.
    """
    return LocalSearch(read_config(folder), tuple(read_trials(folder)))
