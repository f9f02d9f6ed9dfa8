"""Keeps what a script saves away from its user's files."""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from determined_amp.amp.patched import patched

# Loggers and hubs, switched off by their own variables.
_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_OFFLINE": "1",
}

# What saves a file.
_SAVE = ("save", "save_file", "save_model")
# What reads, copies, renames or removes one.
_USE = (
    *("load", "load_file", "load_model", "replace", "rename", "remove", "unlink"),
    *("move", "copyfile", "copy", "copy2"),
)
# The names of the arguments that are files, of what saves and of what uses one.
_SOURCES, _TARGET = ("f", "filename", "src", "path"), "dst"


@contextmanager
def saving_into(folder: Path) -> Iterator[None]:
    """Send what `torch.save` and safetensors write in this block into a folder.

    What reads, renames, copies or removes such a file afterwards finds it there.
    """
    scratch = _Scratch(folder)
    modules = [torch, os, shutil]
    with suppress(ImportError):
        modules.append(importlib.import_module("safetensors.torch"))
    with ExitStack() as stack:
        off = {**_OFF, "MLFLOW_TRACKING_URI": f"file:{folder}"}
        stack.enter_context(mock.patch.dict(os.environ, off))
        for names, call in ((_SAVE, scratch.save), (_USE, scratch.use)):
            for module in modules:
                for name in vars(module).keys() & names:
                    replacement = partial(call, getattr(module, name))
                    stack.enter_context(patched(module, name, replacement))
        yield


class _Scratch:
    """A folder that has a place for each path that a script may save to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save into the folder."""
        call = inspect.signature(own).bind(*args, **kwargs)
        for name in call.arguments.keys() & _SOURCES:
            call.arguments[name] = self._place_of(call.arguments[name])
        return own(*call.args, **call.kwargs)

    def use(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read, rename, copy or remove within the folder what was saved here, else the
        file.
        """
        call = inspect.signature(own).bind(*args, **kwargs)
        for name in call.arguments.keys() & _SOURCES:
            place = self._place_of(call.arguments[name])
            if isinstance(place, Path) and place.is_file():
                call.arguments[name] = place
                if _TARGET in call.arguments:
                    call.arguments[_TARGET] = self._place_of(call.arguments[_TARGET])
        return own(*call.args, **call.kwargs)

    def _place_of(self, path: Any) -> Any:
        """Where the file of a path is in the folder; an open file as it is."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        asked = Path(os.path.abspath(path))
        place = self._folder / asked.relative_to(asked.anchor)
        is_folder = asked.is_dir()
        (place if is_folder else place.parent).mkdir(parents=True, exist_ok=True)
        return place
