"""The runs of one source of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from determined_amp.amp.errors import UserError
from determined_amp.experiment.experiment import searcher_of
from determined_amp.runs.run import Run, is_scale
from determined_amp.search.search_folder import ranked


class ReportError(UserError):
    """A report cannot be made. The message says why, and what to do."""


@dataclass(frozen=True)
class Source:
    """The runs of one source: a run folder, a search, or an experiment on a cluster.

    Args:
        origin: The folder, or the experiment and its master.
        runs: All of its runs.
        config: Configuration of the search or experiment; empty for a run folder.
        left_out: A sentence for each precision that was not trained at all.
        notes: Further sentences for the report.
    """

    origin: str
    runs: tuple[Run, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.origin))

    @property
    def metric(self) -> str:
        """The validation metric that ranks the runs."""
        return str(searcher_of(self.config).metric)

    @property
    def also_searched(self) -> tuple[str, ...]:
        """Hyperparameters besides the loss scale that differ between runs."""
        names = dict.fromkeys(name for run in self.runs for name in run.hparams)
        return tuple(
            name
            for name in names
            if not is_scale(name) and len({repr(run.hparams.get(name)) for run in self.runs}) > 1
        )

    def ranked(self) -> list[Run]:
        """The runs that reported a finite metric, best first; of equals those nearest to 2^16."""
        return ranked(self.config, self.runs)
