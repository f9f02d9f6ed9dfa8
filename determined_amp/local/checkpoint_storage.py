"""Stores the checkpoints of a run folder, each complete or absent.

It keeps the newest checkpoint, the best one, and the newest with finite weights.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import operator
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from determined import core
from determined.common import storage

from determined_amp.amp.plain_data import Metrics, Values
from determined_amp.experiment.failures import OF_A_DISK
from determined_amp.experiment.sections import Searcher
from determined_amp.local.ending import DiskError
from determined_amp.runs.folder import complete_checkpoints
from determined_amp.trial.checkpoint import CheckpointError, check_bytes

logger = logging.getLogger(__name__)

# The file with the counts of Determined's loop, and the metadata key of its checksum.
_STATE, _CHECKSUM = "trial_state.pkl", "trial_state_crc32"


@contextmanager
def translating_disk_errors(folder: Path) -> Iterator[None]:
    """Raise a `DiskError` if a disk is full or broken during the run in `folder`."""
    try:
        yield
    except OSError as error:
        if error.errno not in OF_A_DISK:
            raise
        raise DiskError(
            f"{folder}: the run cannot go on: {error}; fix this, then continue with "
            "--resume: the checkpoints it may have are intact"
        ) from error


@dataclass
class BestValidation:
    """The best validation of a run, which ranks its checkpoints. The first of equal
    ones is the best.
    """

    searcher: Searcher  # its metric decides
    value: float | None = None
    batches: int | None = None  # number of batches trained before it

    def note(self, batches: int, metrics: Metrics) -> None:
        """Note the validation after `batches` batches. Only a finite number counts."""
        value = metrics.get(str(self.searcher.metric))
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        is_better = operator.lt if self.searcher.smaller_is_better else operator.gt
        if self.value is None or is_better(value, self.value):
            self.value, self.batches = float(value), batches

    def is_after(self, batches: int) -> bool:
        """Whether it is the validation after `batches` batches."""
        return self.batches == batches


def storage_in(folder: Path) -> storage.StorageManager:
    """Determined's storage of checkpoints, in a folder."""
    return storage.SharedFSStorageManager(str(folder.absolute()))


class LocalCheckpoints(core.DummyCheckpointContext):
    """Determined's checkpoint storage, in one folder on this machine.

    A checkpoint is written under a hidden name, flushed to the disk and then renamed.
    So a process that is killed leaves either the whole checkpoint or none.

    Args:
        distributed: The processes of this run.
        folder: The folder of the checkpoints.
        is_best: Whether the validation after a number of batches is the best so far.

    Attributes:
        finite: Whether all weights are finite. The controller sets it in every save.
    """

    def __init__(
        self,
        distributed: core.DistributedContext,
        folder: Path,
        is_best: Callable[[int], bool],
    ) -> None:
        self._folder = folder.absolute()
        super().__init__(distributed, storage_in(folder))
        self._is_best = is_best
        self.finite = True
        for leftover in self._folder.glob(".batch-*"):  # of a killed process
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def store_path(
        self, metadata: Values | None = None, *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """Replaces Determined's method. The loop calls it on the chief, not sharded."""
        assert metadata is not None
        metadata["best"] = self._is_best(metadata["steps_completed"])
        name = checkpoint_name(metadata["steps_completed"])
        final, partial = self._folder / name, self._folder / f".{name}.partial"
        try:
            partial.mkdir(parents=True)
            yield partial, name
            metadata["finite"] = self.finite
            _complete(partial, metadata)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if not _is_of_the_writer(error):
                raise
            told = f"could not be saved (is the disk full?): {error}"
            raise OSError(errno.ENOSPC, told, str(final)) from error
        # A resume has passed over a checkpoint of this name, so no resume needs it.
        replaced = self._folder / f".{name}.replaced"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune(final)

    def _prune(self, newest: Path) -> None:
        # A resume may have skipped damaged checkpoints that are later than `newest`.
        # One whose metadata cannot be read is kept, because it may be the best.
        metadata: dict[Path, Values] = {}
        for path in complete_checkpoints(self._folder):
            with suppress(CheckpointError):
                metadata[path] = read_metadata(path)
        saved = [path for path in metadata if path <= newest]
        best = [path for path in saved if metadata[path].get("best")]
        finite = [path for path in saved if metadata[path].get("finite", True)]
        keep = {newest, *best[-1:], *finite[-1:]}
        for path in metadata.keys() - keep:
            # Rename it first, so that a kill leaves no half-deleted `batch-*`.
            doomed = path.rename(path.with_name(f".{path.name}.deleted"))
            shutil.rmtree(doomed)


def _complete(partial: Path, metadata: Values) -> None:
    """Check the weights, write the metadata, and flush all to the disk."""
    with zipfile.ZipFile(partial / "state_dict.pth"):
        pass  # raises if the file is cut off: torch ignores a failure of its last flush
    metadata[_CHECKSUM] = zlib.crc32((partial / _STATE).read_bytes())
    (partial / "metadata.json").write_text(json.dumps(metadata, indent=2))
    # Flushing many files at once takes a tenth of the time of flushing them one by one.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_sync, partial.rglob("*")))  # raises what a thread raised
    _sync(partial)


def checkpoint_name(batches: int) -> str:
    """The name of the checkpoint after that many batches."""
    return f"batch-{batches:08d}"


def read_metadata(checkpoint: Path) -> Values:
    """The metadata of a checkpoint: `steps_completed` (batches), `best`, versions.

    Raises:
        CheckpointError: if they cannot be read, or belong to another checkpoint.
    """
    try:
        metadata: Values = json.loads((checkpoint / "metadata.json").read_bytes())
        name = checkpoint_name(metadata["steps_completed"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint}: metadata.json cannot be read: {error}"
        ) from error
    # With a changed digit it is still JSON, but a resume would train on the wrong data.
    if name != checkpoint.name:
        raise CheckpointError(
            f"{checkpoint}: metadata.json is damaged: it does not say that it is of "
            "these batches"
        )
    return metadata


def check_state(checkpoint: Path, metadata: Values) -> None:
    """Check the loop's counts against their checksum in the metadata.

    Raises:
        CheckpointError: if a byte has changed, or the file is not there.
    """
    try:
        checksum = zlib.crc32((checkpoint / _STATE).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint}: {_STATE} cannot be read: {error}"
        ) from error
    if checksum != metadata.get(_CHECKSUM):
        raise CheckpointError(f"{checkpoint}: {_STATE} is damaged: a byte has changed")


@dataclass(frozen=True)
class Resume:
    """The checkpoint that a run continues from, or the start of a new run."""

    checkpoint: str = ""  # name of the checkpoint; empty for a new run
    batches: int = 0  # number of batches trained before

    @staticmethod
    def latest(folder: Path) -> Resume:
        """The newest checkpoint of a run folder that is whole and has finite weights.

        Warns of each newer checkpoint that it passes over.

        Raises:
            CheckpointError: if there is no such checkpoint.
        """
        passed_over = []
        for checkpoint in sorted(
            (folder / "checkpoints").glob("batch-*"), reverse=True
        ):
            try:
                metadata = read_metadata(checkpoint)
                check_bytes(checkpoint)
                check_state(checkpoint, metadata)
                if metadata.get("finite", True):
                    return Resume(checkpoint.name, metadata["steps_completed"])
                reason = f"{checkpoint}: its weights are not finite"
            except CheckpointError as error:
                reason = str(error)
            logger.warning("%s; trying the checkpoint before it", reason)
            passed_over.append(reason)
        reasons = f": {'; '.join(passed_over)}" if passed_over else ""
        raise CheckpointError(
            f"{folder}: no checkpoint to resume from{reasons}; start a new run instead"
        )


def _is_of_the_writer(error: BaseException) -> bool:
    """Whether torch could not write the weights. It says nothing of a disk then."""
    of_torch = isinstance(error, RuntimeError) and re.search(
        "inline_container|iostream", str(error)
    )
    return bool(of_torch) or isinstance(error, zipfile.BadZipFile)


def _sync(path: Path) -> None:
    """Flush a file to the disk; for a folder, the names of its files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
