"""Keeps what a script saves away from its user's files."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from determined_amp.amp.patched import patched

# Loggers and hubs, switched off by their own variables.
_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "MLFLOW_TRACKING_URI": "file:{folder}",
    "HF_HUB_OFFLINE": "1",
}

# Functions of a source and a target: what was saved into the scratch folder stays in it.
_HAND_ON = (
    *((os, "replace"), (os, "rename"), (shutil, "move")),
    *((shutil, "copyfile"), (shutil, "copy"), (shutil, "copy2")),
)


@contextmanager
def saving_into(folder: Path) -> Iterator[None]:
    """Send what `torch.save` and safetensors write in this block into a folder."""
    scratch = _Scratch(folder)
    savers: list[tuple[Any, str, int]] = [(torch, "save", 1)]
    with suppress(ImportError):
        safetensors = importlib.import_module("safetensors.torch")
        savers += [(safetensors, "save_file", 1), (safetensors, "save_model", 1)]
    with ExitStack() as stack:
        for name, value in _OFF.items():
            stack.enter_context(_variable(name, value.format(folder=folder)))
        for owner, name, place in savers:
            own = getattr(owner, name)
            stack.enter_context(patched(owner, name, partial(scratch.save, own, place)))
        stack.enter_context(patched(torch, "load", partial(scratch.read, torch.load)))
        for owner, name in _HAND_ON:
            own = getattr(owner, name)
            stack.enter_context(patched(owner, name, partial(scratch.hand_on, own)))
        for name in ("remove", "unlink"):
            own = getattr(os, name)
            stack.enter_context(patched(os, name, partial(scratch.read, own)))
        yield


class _Scratch:
    """The files that were saved, by the path that was asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}

    def save(self, own: Callable[..., Any], place: int, *args: Any, **kwargs: Any) -> Any:
        """Save into the folder; `place` is that of the path among the arguments."""
        given = [*args]
        if len(given) > place:
            given[place] = self._instead_of(given[place])
        else:
            kwargs = {
                key: self._instead_of(value) if key in ("f", "filename") else value
                for key, value in kwargs.items()
            }
        return own(*given, **kwargs)

    def read(self, own: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read or remove what was saved here, else the file itself."""
        return own(self._known(path) or path, *args, **kwargs)

    def hand_on(self, own: Callable[..., Any], source: Any, to: Any, *more: Any, **how: Any) -> Any:
        """Rename or copy within the folder what was saved here."""
        known = self._known(source)
        return own(known or source, self._instead_of(to) if known else to, *more, **how)

    def _known(self, path: Any) -> Path | None:
        if not isinstance(path, (str, os.PathLike)):
            return None
        return self._files.get(os.path.abspath(path))

    def _instead_of(self, path: Any) -> Any:
        if not isinstance(path, (str, os.PathLike)):
            return path  # an open file
        name = os.path.abspath(path)
        if name not in self._files:
            self._files[name] = self._folder / f"{len(self._files)}-{Path(name).name}"
        return self._files[name]


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
