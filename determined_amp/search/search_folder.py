"""Describes a search, and reads and writes a local search folder, without Optuna.

search.yaml    the search; its `max_concurrent_trials` is the number of workers
study.db       Optuna's study: the points, which of them wait, and the reported values
trials/0000    the run folder of trial 0, and so on, see `runs.folder`
compare.json   `left_out`, `notes` and `command` of `Search`; `compare` writes it
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from determined_amp.amp.plain_data import Config
from determined_amp.experiment.dotted import value_at
from determined_amp.experiment.experiment import read_yaml
from determined_amp.experiment.files import write_whole
from determined_amp.experiment.hyperparameters import ranges
from determined_amp.experiment.yaml_text import dump_yaml
from determined_amp.finder.scale_score import (
    ScaleAdvice,
    advice_of,
    bits_from_default,
)
from determined_amp.runs.folder import RUN_FILE, read_run
from determined_amp.runs.run import COMPARED, SCALE, Run, RunState, curve_of

SEARCH_FILE = "search.yaml"
_REMARKS = "compare.json"

# What the user may type for a comparison, if it is not known what was typed.
COMPARE = "det-amp compare YAML"


@dataclass(frozen=True)
class Search:
    """A local search, an experiment on a cluster, or a single run, with its trials."""

    origin: str  # the folder, or the experiment and its master
    runs: tuple[Run, ...]  # the trials that have started, in the order of their numbers
    # The configuration; empty for a run folder.
    config: Config = field(default_factory=dict)
    # Sentences on what is missing, such as a precision that was not trained at all.
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()  # further sentences for the report
    # What the user typed for a comparison, or may type for one.
    command: str = COMPARE

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.origin))

    @property
    def metric(self) -> str:
        """The validation metric that ranks the trials."""
        return str(value_at(self.config, "searcher.metric"))

    @property
    def searched(self) -> list[str]:
        """The dotted names of the searched hyperparameters."""
        return list(ranges(self.config.get("hyperparameters") or {}))

    @property
    def compares(self) -> bool:
        """Whether the search compares precisions. Then it ranks nothing."""
        return COMPARED in self.searched

    @property
    def is_single(self) -> bool:
        """Whether this is a single run, and not a search."""
        return value_at(self.config, "searcher.name") in (None, "single")

    def lost(self) -> list[Run]:
        """The trials that failed, because of an error or their hyperparameters."""
        return [run for run in self.runs if run.state.is_failure]

    def value(self, run: Run) -> float | None:
        """The value that ranks a trial, as on the platform: its best validation.

        None if the trial reported no finite value, or if it neither completed nor was
        stopped early by its search.
        """
        if run.state not in (RunState.COMPLETED, RunState.PRUNED):
            return None
        curve = curve_of(run.validations, self.metric)
        values = [value for _, value in curve if math.isfinite(value)]
        return min(values, key=lambda value: self._sign * value, default=None)

    def ranked(self) -> list[Run]:
        """The trials with a result, best first. Of equal trials, the one whose loss
        scale is nearest to 2^16 comes first.
        """

        def rank(run: Run) -> tuple[float, float]:
            value = self._sign * (self.value(run) or 0.0)
            return value, bits_from_default(run.scale_log2)

        ranked = [run for run in self.runs if self.value(run) is not None]
        return sorted(ranked, key=rank)

    @property
    def scale_advice(self) -> ScaleAdvice | None:
        """The loss scale to set; None unless the search varies only the loss scale."""
        if self.searched != [SCALE]:
            return None
        lost = [(r.scale_log2, r.metrics.get("steps_lost")) for r in self.ranked()]
        return advice_of(self.metric, lost)

    @property
    def _sign(self) -> int:
        return -1 if value_at(self.config, "searcher.smaller_is_better") is False else 1


def write_config(folder: Path, config: Config, workers: int) -> Config:
    """Write the configuration of a search that runs with this number of workers.

    Returns:
        The configuration that was written.
    """
    searcher = dict(config["searcher"])
    if searcher["name"] != "single":  # a single searcher refuses this key
        searcher["max_concurrent_trials"] = workers
    written = {**config, "searcher": searcher}
    write_whole(folder / SEARCH_FILE, dump_yaml(written))
    return written


def write_remarks(
    folder: Path, left_out: Sequence[str], notes: Sequence[str], command: str
) -> None:
    """Write `left_out`, `notes` and `command` of a search into its folder."""
    remarks = {"left_out": left_out, "notes": notes, "command": command}
    write_whole(folder / _REMARKS, json.dumps(remarks, indent=2) + "\n")


def read_config(folder: Path) -> Config:
    """The configuration of the search in a folder.

    Raises:
        ConfigError: if it cannot be read.
    """
    return read_yaml(str(folder / SEARCH_FILE))


def workers_of(config: Config) -> int:
    """Number of trials of a search that run at the same time."""
    return int(config["searcher"].get("max_concurrent_trials", 1))


def read_search(folder: Path) -> Search:
    """Read the search in a folder, which may still be running.

    Raises:
        ConfigError: if its configuration cannot be read.
    """
    config = read_config(folder)
    shared = workers_of(config) > 1
    records = sorted(folder.glob(f"trials/[0-9]*/{RUN_FILE}"))
    runs = [
        dataclasses.replace(read_run(record.parent), shares_device=shared)
        for record in records
    ]
    file = folder / _REMARKS
    remarks = json.loads(file.read_bytes()) if file.exists() else {}
    return Search(str(folder), tuple(runs), config, **remarks)
