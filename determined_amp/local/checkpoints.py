"""Checkpoints in a run folder: whole or not there, the newest and the best kept."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from determined import core
from determined.common import storage

from determined_amp.amp.checkpoint import CheckpointError
from determined_amp.local.reports import LocalReports


class LocalCheckpoints(core.DummyCheckpointContext):
    """Determined's checkpoint storage, in one folder on this machine.

    A checkpoint is written under a hidden name, flushed to the disk and then renamed, so a process
    that is killed leaves either the whole checkpoint or none.

    Args:
        distributed: The processes of this run.
        folder: Where the checkpoints are.
        reports: Knows which validation was the best; None where nothing is saved.
    """

    def __init__(
        self,
        distributed: core.DistributedContext,
        folder: Path,
        reports: LocalReports | None,
    ) -> None:
        folder = folder.absolute()
        super().__init__(distributed, storage.SharedFSStorageManager(str(folder)))
        self._folder = folder
        self._reports = reports
        if reports is not None:
            for leftover in folder.glob(".batch-*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)

    def _store_path_single(
        self, metadata: dict[str, Any] | None = None
    ) -> Iterator[tuple[Path, str]]:
        assert metadata is not None
        name = checkpoint_name(metadata["steps_completed"])
        partial = self._folder / f".{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        assert self._reports is not None
        metadata["best"] = self._reports.is_best(metadata["steps_completed"])
        try:
            yield partial, name
            _check_whole(partial / "state_dict.pth")
            self._write_metadata_file(os.fspath(partial), metadata)
            _flush(partial)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if _is_of_the_disk(error):
                raise CheckpointError(
                    f"{self._folder / name}: could not be saved: {error}; "
                    "the checkpoints before it are intact"
                ) from error
            raise
        final, replaced = self._folder / name, self._folder / f".{name}.replaced"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _sync(self._folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._prune()
        self._reports.saved(complete_checkpoints(self._folder))

    def _prune(self) -> None:
        saved = complete_checkpoints(self._folder)
        keep = {saved[-1], *[path for path in saved if read_metadata(path)["best"]][-1:]}
        for path in saved:
            if path not in keep:
                # Renamed first: a process killed meanwhile leaves no half of it under its name.
                doomed = path.rename(path.with_name(f".{path.name}.deleted"))
                shutil.rmtree(doomed)


def checkpoint_name(batches: int) -> str:
    """The folder of the checkpoint after that many batches."""
    return f"batch-{batches:08d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("batch-*") if (path / "metadata.json").exists())


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """What was noted beside a checkpoint: `steps_completed` (batches), `best`, versions.

    Raises:
        CheckpointError: if the note is damaged.
    """
    try:
        metadata: dict[str, Any] = json.loads((checkpoint / "metadata.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{checkpoint}: metadata.json cannot be read: {error}") from error
    return metadata


def _is_of_the_disk(error: BaseException) -> bool:
    """Whether a save failed because of the disk; torch's writer says so in a RuntimeError."""
    words = ("inline_container", "iostream")
    of_torch = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return of_torch or isinstance(error, (OSError, zipfile.BadZipFile))


def _check_whole(weights: Path) -> None:
    """Raise if the end of the file is missing: torch does not notice if its last flush fails."""
    with zipfile.ZipFile(weights):
        pass


def _flush(folder: Path) -> None:
    """Have the disk hold every file before the rename says that they are there."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Of a folder: the names of its files, a rename among them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
