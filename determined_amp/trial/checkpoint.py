"""Checkpoints that every supported torch reads, without unpickling code.

Determined 0.38.1 saves numpy's random state as an array and loads with
`torch.load(path)`. From torch 2.6 on that call loads weights only and refuses the
array, so no trial can be resumed. Up to torch 2.5 it unpickles anything, so a
checkpoint can run code. This module fixes both: `PortableCheckpoint` saves plain types
only, and `SafeController` always loads weights only.
"""

from __future__ import annotations

import io
import logging
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import pytorch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from determined_amp.amp.errors import UserError, one_line
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.tensors import own_copy
from determined_amp.trial.determined_private import schedulers
from determined_amp.trial.random_state import plain_numbers

logger = logging.getLogger(__name__)


# The key under which `SafeController` notes whether a loaded checkpoint is from this
# trial.
SAME_TRIAL = "determined_amp.same_trial"

# The key of the class names of the optimizers.
_KINDS = "determined_amp.optimizers"


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not fit this trial."""


class PortableCheckpoint(pytorch.PyTorchCallback):
    """Saves numpy's random state and the state of schedulers as plain types.

    `numpy.random.set_state` accepts plain types. The state of a scheduler may hold
    other schedulers, and with torch 2.3 methods.

    Args:
        context: The context of the trial.

    Attributes:
        of_ranks: The random state of every rank, if there are several. Determined
            itself saves only that of the chief.
    """

    NAME = "determined_amp.portable_checkpoint"

    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        self.of_ranks: Sequence[StateDict] | None = None
        self._schedulers = [scheduler for scheduler, _ in schedulers(context)]
        self._optimizers = context.optimizers
        self._rank = context.distributed.rank
        self._has_saved = False
        self._remembered: StateDict = {}

    def remember(self, callbacks: Mapping[str, pytorch.PyTorchCallback]) -> None:
        """Save the states of schedulers and callbacks as they are now."""
        moved = [_without_code(each.state_dict()) for each in self._schedulers]
        states = {name: each.state_dict() for name, each in callbacks.items()}
        self._remembered = own_copy(
            {"lr_schedulers_state_dict": moved, "callbacks": states}
        )

    def on_checkpoint_save_start(self, checkpoint: StateDict) -> None:
        checkpoint.update(self._remembered)
        state = checkpoint["rng_state"]
        state["np_rng_state"] = plain_numbers(state["np_rng_state"])
        if self.of_ranks is not None:
            checkpoint["rng_state_of_ranks"] = self.of_ranks
        checkpoint[_KINDS] = _kinds_of(self._optimizers)
        states = checkpoint.get("lr_schedulers_state_dict", [])
        plain = [_without_code(state) for state in states]
        checkpoint["lr_schedulers_state_dict"] = plain
        if not self._has_saved:
            self._has_saved = True
            for scheduler, state in zip(self._schedulers, plain, strict=True):
                _warn_if_refused(type(scheduler).__name__, state)
            for name, state in checkpoint["callbacks"].items():
                _warn_if_refused(f"callback {name}", state)

    def on_checkpoint_load_start(self, checkpoint: StateDict) -> None:
        of_ranks = checkpoint.pop("rng_state_of_ranks", ())
        if self._rank < len(of_ranks):
            checkpoint["rng_state"] = of_ranks[self._rank]
        states = checkpoint.get("lr_schedulers_state_dict", [])
        for state, scheduler in zip(states, self._schedulers, strict=False):
            state.update(_restored(state, scheduler))


# The errors of torch, pickle and the trial's own `load_state_dict` for a state that
# does not fit.
_NOT_RESTORED = (
    *(RuntimeError, LookupError, ValueError, TypeError, AttributeError),
    *(EOFError, OSError, pickle.PickleError),
)


@contextmanager
def restoring(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except _NOT_RESTORED as error:
        raise CheckpointError(
            f"{checkpoint}: cannot be restored into this trial: "
            f"{_in_one_sentence(error)}"
        ) from error


def _in_one_sentence(error: Exception) -> str:
    """The text of an error in one sentence; torch writes a line per unfit tensor."""
    first, *others = str(error).splitlines() or [""]
    if not others:
        return first
    return f"{first} {one_line(others[0].strip())} (1 of {len(others)} problems)"


@contextmanager
def checksums_written() -> Iterator[None]:
    """Let `torch.save` write checksums in this block, whatever the trial has set."""
    chosen = getattr(torch.serialization, "get_crc32_options", None)
    if chosen is None or chosen():  # torch before 2.6 always writes them
        yield
        return
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(False)


def check_bytes(checkpoint: Path) -> None:
    """Compare the weights of a checkpoint with the checksums that torch has saved.

    Raises:
        CheckpointError: if a byte has changed, or the file is cut off.
    """
    file = checkpoint / "state_dict.pth"
    if not file.exists():
        raise CheckpointError(
            f"{checkpoint}: not a checkpoint: it has no state_dict.pth"
        )
    try:
        with zipfile.ZipFile(file) as content:
            damaged = content.testzip()
    except Exception as error:  # zipfile raises nearly anything for a damaged directory
        raise CheckpointError(
            f"{checkpoint}: state_dict.pth is damaged: {error}"
        ) from error
    if damaged is not None:
        raise CheckpointError(
            f"{checkpoint}: state_dict.pth is damaged: {damaged} has changed"
        )


def check_optimizers(checkpoint: StateDict, optimizers: Sequence[Optimizer]) -> None:
    """Check that a checkpoint has the optimizers of a trial.

    Determined would load what fits, and be silent about the rest.

    Raises:
        ValueError: if their number or their kinds differ.
    """
    states = checkpoint.get("optimizers_state_dict")
    if states is None:  # of an older Determined
        return
    if len(states) != len(optimizers):
        raise ValueError(
            f"optimizers in the checkpoint: {len(states)}; in the trial: "
            f"{len(optimizers)}"
        )
    saved, kinds = checkpoint.get(_KINDS), _kinds_of(optimizers)
    if saved not in (None, kinds):
        raise ValueError(
            f"its optimizers are {', '.join(saved)}, and those of the trial are "
            f"{', '.join(kinds)}"
        )


def _kinds_of(optimizers: Sequence[Optimizer]) -> list[str]:
    return [type(optimizer).__name__ for optimizer in optimizers]


def allow_numpy_random_state() -> None:
    """Let weights-only loading read the numpy array of trials without our callback.

    torch before 2.5 has no list of allowed types, and refuses such a checkpoint.
    """
    add_safe_globals = getattr(torch.serialization, "add_safe_globals", None)
    if add_safe_globals is None:
        return
    reconstruct = np.empty(0).__reduce__()[0]
    names = (
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
    )
    array_types = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    add_safe_globals([*array_types, *((reconstruct, name) for name in names)])


# Marks the saved state of a scheduler that is held by another scheduler.
_HELD = "determined_amp.held_scheduler"


def _restored(state: StateDict, scheduler: Any) -> StateDict:
    """The state of a scheduler with each scheduler that it holds, restored."""
    return {
        key: _held(value, getattr(scheduler, key, None)) for key, value in state.items()
    }


def _held(value: Any, live: Any) -> Any:
    """A saved value, or the live scheduler whose state it is."""
    if isinstance(value, list) and isinstance(live, list):
        return [_held(*pair) for pair in zip_longest(value, live[: len(value)])]
    if not isinstance(value, dict) or _HELD not in value:
        return value
    live.load_state_dict(_restored(value[_HELD], live))
    return live


def _warn_if_refused(name: str, state: Any) -> None:
    """Warn if a checkpoint with this state could not be loaded weights-only."""
    content = io.BytesIO()
    try:
        torch.save(state, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception as error:
        # saving runs the trial's own code, which can raise anything
        logger.warning(
            "no checkpoint of this run can be resumed: the state of %s is more than "
            "plain values and tensors (%s). Return plain ones from its state_dict()",
            *(name, one_line(error)),
        )


def _without_code(state: Any) -> Any:
    if isinstance(state, LRScheduler):
        return {_HELD: _without_code(state.state_dict())}
    if isinstance(state, (list, tuple)):
        return type(state)(_without_code(item) for item in state)
    if isinstance(state, dict):
        return {
            key: _without_code(value)
            for key, value in state.items()
            if not callable(value)
        }
    return state


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, and only plain values are allowed"
        )


def read_without_code(path: Path) -> StateDict:
    """Read a file that Determined unpickles later; raise unless it is plain data."""
    with path.open("rb") as file:
        state: Any = _PlainUnpickler(file).load()
    if not isinstance(state, dict):
        raise TypeError(
            f"{path.name} holds a {type(state).__name__}, not the state of a loop"
        )
    return state
