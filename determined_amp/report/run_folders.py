"""Reads the runs of a local search from its folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined_amp.amp.fields import ConfigError
from determined_amp.experiment.dotted import flat
from determined_amp.report.source import ReportError, Source
from determined_amp.runs.folder import RunError
from determined_amp.search.search_folder import (
    STUDY_FILE,
    SearchFolderError,
    read_local_search,
    workers_of,
)

# The file that `compare` writes: the precisions left out, and sentences on the loss scale.
REMARKS = "compare.json"


def read_search(path: Path) -> Source:
    """Read the trials of a local search from its folder or its `study.db`.

    Raises:
        ReportError: if there is no search, or it cannot be read.
    """
    folder = path.parent if path.name == STUDY_FILE else path
    try:
        search = read_local_search(folder)
        shared = workers_of(search.config) > 1
    except (SearchFolderError, ConfigError, RunError) as error:
        raise ReportError(f"{error}, or the id of an experiment on a cluster") from error
    constants = {
        name: value
        for name, value in flat(search.config["hyperparameters"]).items()
        if not isinstance(value, Mapping)
    }
    runs = (
        dataclasses.replace(run, hparams={**constants, **run.hparams}, shares_device=shared)
        for run in search.runs
    )
    return Source(str(path), tuple(runs), search.config, **_remarks(folder))


def _remarks(path: Path) -> Mapping[str, Any]:
    """The remarks of the command `compare` on its runs."""
    file = path / REMARKS
    if not file.is_file():
        return {}
    try:
        noted = json.loads(file.read_text())
        return {key: tuple(map(str, noted[key])) for key in ("left_out", "notes")}
    except (ValueError, LookupError, TypeError) as error:
        raise ReportError(f"{file}: is not what `compare` writes: {error}") from error
