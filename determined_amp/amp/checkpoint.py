"""Checkpoints that every supported torch reads, without unpickling code.

Determined 0.38.1 saves numpy's random state as an array and loads with `torch.load(path)`. From
torch 2.6 on that call unpickles weights only and refuses the array, so no trial can be resumed; up
to torch 2.5 it unpickles anything, so a checkpoint can run code. Both are mended here:
`PortableCheckpoint` saves plain types only, and `SafeController` always loads weights only.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import pytorch

from determined_amp.amp.guard import GuardError
from determined_amp.config.errors import UserError


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of another model."""


class PortableCheckpoint(pytorch.PyTorchCallback):
    """Saves numpy's random state as numbers; `numpy.random.set_state` takes them back."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        name, keys, position, has_gauss, gauss = checkpoint["rng_state"]["np_rng_state"]
        checkpoint["rng_state"]["np_rng_state"] = (
            str(name),
            [int(key) for key in keys],
            int(position),
            int(has_gauss),
            float(gauss),
        )


class SafeController(pytorch._PyTorchTrialController):
    """Determined's training loop, loading checkpoints without running what is in them.

    A run that the guard ends leaves a checkpoint of its last good state.
    """

    def _run(self) -> None:
        try:
            super()._run()
        except GuardError as error:
            if error.state_is_good and not self._checkpoint_is_current():
                self._checkpoint(already_exiting=True)
            raise

    def _load(self, load_path: Path) -> None:
        """Restore the trial from a checkpoint folder.

        Raises:
            CheckpointError: if the checkpoint is incomplete, damaged, unsafe or does not fit.
        """
        if not (load_path / "state_dict.pth").exists():
            raise CheckpointError(f"{load_path}: not a checkpoint: it has no state_dict.pth")
        try:
            _refuse_code(load_path / "trial_state.pkl")
            with patched(torch, "load", partial(torch.load, weights_only=True)):
                super()._load(load_path)
        except (RuntimeError, KeyError, ValueError, EOFError, OSError, pickle.UnpicklingError) as e:
            raise CheckpointError(f"{load_path}: cannot be restored into this trial: {e}") from e


@contextmanager
def controlled_by(controller: Callable[..., pytorch._PyTorchTrialController]) -> Iterator[None]:
    """Let `pytorch.Trainer.fit` run its loop in `controller`; it offers no parameter for that."""
    with patched(pytorch, "_PyTorchTrialController", controller):
        yield


def allow_numpy_random_state() -> None:
    """Let weights-only loading read the array in checkpoints of trials without our callback.

    torch before 2.5 has no such list: there, such a checkpoint is refused.
    """
    add_safe_globals = getattr(torch.serialization, "add_safe_globals", None)
    if add_safe_globals is None:
        return
    reconstruct = np.empty(0).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    array_types = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    add_safe_globals([*array_types, *((reconstruct, name) for name in names)])


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only plain values are allowed")


def _refuse_code(path: Path) -> None:
    """Determined unpickles this file itself; see first that it holds nothing but plain values."""
    with path.open("rb") as file:
        _PlainUnpickler(file).load()


@contextmanager
def patched(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Replace an attribute for a while; for the few places where Determined takes no argument."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
