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

# What saves a file; what reads, copies or removes one; by the names of the arguments of both.
_SAVE, _USE = ("save", "save_file", "save_model"), ("load", "load_file", "load_model")
_FILES: dict[Any, tuple[str, ...]] = {
    os: ("replace", "rename", "remove", "unlink"),
    shutil: ("move", "copyfile", "copy", "copy2"),
}
_SOURCES, _TARGETS = ("f", "filename", "src", "path"), ("f", "filename", "dst")


@contextmanager
def saving_into(folder: Path) -> Iterator[None]:
    """Send what `torch.save` and safetensors write in this block into a folder.

    What reads, renames, copies or removes such a file afterwards finds it there.
    """
    scratch = _Scratch(folder)
    modules = [torch]
    with suppress(ImportError):
        modules.append(importlib.import_module("safetensors.torch"))
    savers = [(module, name) for module in modules for name in _SAVE if hasattr(module, name)]
    users = [(module, name) for module in modules for name in _USE if hasattr(module, name)]
    users += [(module, name) for module, names in _FILES.items() for name in names]
    off = {**_OFF, "MLFLOW_TRACKING_URI": f"file:{folder}"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, off))
        for names, call in ((savers, scratch.save), (users, scratch.use)):
            for owner, name in names:
                replacement = partial(call, getattr(owner, name))
                stack.enter_context(patched(owner, name, replacement))
        yield


class _Scratch:
    """The files that were saved, by the path that was asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}

    def save(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save into the folder."""
        call = inspect.signature(own).bind(*args, **kwargs)
        for name in _TARGETS:
            if name in call.arguments:
                call.arguments[name] = self._instead_of(call.arguments[name])
        return own(*call.args, **call.kwargs)

    def use(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read, rename, copy or remove within the folder what was saved here, else the file."""
        call = inspect.signature(own).bind(*args, **kwargs)
        for name in _SOURCES:
            known = self._known(call.arguments.get(name))
            if known is not None:
                target = call.arguments.get("dst")
                if target is not None:
                    of_folder = os.path.join(target, os.path.basename(call.arguments[name]))
                    target = of_folder if os.path.isdir(target) else target
                    call.arguments["dst"] = self._instead_of(target)
                call.arguments[name] = known
        return own(*call.args, **call.kwargs)

    def _known(self, path: Any) -> Path | None:
        is_path = isinstance(path, (str, os.PathLike))
        return self._files.get(os.path.abspath(path)) if is_path else None

    def _instead_of(self, path: Any) -> Any:
        if not isinstance(path, (str, os.PathLike)):
            return path  # an open file
        name = os.path.abspath(path)
        return self._files.setdefault(name, self._folder / f"{len(self._files)}-{Path(name).name}")
