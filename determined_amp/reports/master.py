"""A connection to a Determined master, whose faults are sentences."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from determined.common.api import bindings, errors

from determined_amp.local.master import log_in
from determined_amp.reports.sources import ReportError

if TYPE_CHECKING:
    from determined.experimental.client import Determined

MASTER = "DET_MASTER"


def is_experiment(source: str) -> bool:
    """Whether it is the id of an experiment, and not a file or folder of that name."""
    return source.isdecimal() and not Path(source).exists()


def experiment_folder(source: str) -> Path:
    """Where the report on an experiment goes unless told otherwise."""
    return Path("runs") / f"experiment-{source}"


@contextmanager
def asking_for(number: int) -> Iterator[tuple[Determined, str]]:
    """The master that `DET_MASTER` names, and what to call its experiment `number`.

    Raises:
        MasterError: if there is no such master, or it does not let us in.
        ReportError: for whatever goes wrong meanwhile: there is no such experiment.
    """
    address = os.environ.get(MASTER)
    if not address:
        raise ReportError(
            f"experiment {number} is on a cluster, and {MASTER} is not set; set it to the address "
            "of the master, or give the folder of a local search"
        )
    session = log_in(address)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the SDK warns of itself
        from determined.experimental.client import Determined  # noqa: PLC0415
    try:
        yield Determined._from_session(session), f"experiment {number} on {session.master}"
    except errors.NotFoundException as error:
        raise ReportError(f"{session.master} has no experiment {number}: {error}") from error
    except (
        errors.BadRequestException,
        errors.BadResponseException,
        bindings.APIHttpError,
        OSError,
        KeyError,
        ValueError,
    ) as error:
        raise ReportError(f"{session.master} gave no experiment {number}: {error}") from error
