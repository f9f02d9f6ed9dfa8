"""The newest batch of a trial, kept so that the guard can train it again."""

from __future__ import annotations

from typing import Any

from determined import pytorch

from determined_amp.amp.replay import own_copy
from determined_amp.amp.tensors import tensors_of


class NewestBatch:
    """Trains batches with the `train_batch` of a trial, and keeps the newest one.

    A trial may take its batch apart and change tensors in place. Tensors are costly to copy, so
    those of later batches are copied only if the trial has changed a tensor before.

    Args:
        trial: The trial, with its own `train_batch`.

    Attributes:
        batch: The newest batch as the trial got it; None before the first.
    """

    def __init__(self, trial: pytorch.PyTorchTrial) -> None:
        self.batch: Any = None
        self._trial = trial
        self._train_batch: Any = trial.train_batch
        self._indices: dict[str, int] = {}
        self._changes_batches: bool | None = None  # not known before the first one

    @property
    def length(self) -> int:
        """The number of samples of the newest batch, as the trial counts them."""
        return int(self._trial.get_batch_length(self.batch))

    def train(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train a batch, and return what the trial returns."""
        self.batch = own_copy(batch, shared=self._changes_batches is False)
        self._indices = {"epoch_idx": epoch_idx, "batch_idx": batch_idx}
        tensors = [tensor for tensor in tensors_of(batch) if not tensor.is_inference()]
        versions = [tensor._version for tensor in tensors]
        result = self._train_batch(batch=batch, **self._indices)
        has_changed = versions != [tensor._version for tensor in tensors]
        self._changes_batches = has_changed or bool(self._changes_batches)
        return result

    def train_again(self) -> None:
        """Train a copy of the newest batch with the same indices."""
        self._train_batch(batch=own_copy(self.batch), **self._indices)
