"""Loaders whose order and augmentation can be resumed exactly.

Determined resumes a trial by skipping batches of the sampler, in a new process. So neither the
order nor an augmentation may depend on how much random state was consumed before: here both are
functions of (seed, epoch, image) alone, the same for every number of ranks and loader workers.
(`pytorch.DataLoader(shuffle=True)` draws its order from the global generator: it changes after a
resume, and ranks whose generators differ train on overlapping shards.)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from determined import pytorch
from torch.utils.data import Dataset, Sampler

from determined_amp import UserError
from determined_amp.config.settings import read_section

Batch = tuple[torch.Tensor, torch.Tensor]
T = TypeVar("T")


class Sample(NamedTuple):
    """One draw of the training set: which image, and in which pass over the data."""

    epoch: int
    image: int


class Samples(Protocol):
    """A dataset that is fetched a batch at a time; a batch is a tuple."""

    def __len__(self) -> int: ...

    def __getitems__(self, samples: Sequence[Sample]) -> tuple[Any, ...]: ...


class Images(Protocol):
    """`Samples` whose batches are images and labels."""

    classes: int

    def __len__(self) -> int: ...

    def __getitems__(self, samples: Sequence[Sample]) -> Batch: ...


class DataError(UserError):
    """The data is not what the settings say, or too little of it."""


class EpochSampler(Sampler[Sample]):
    """Yields every index once per pass; the order is a function of (seed, epoch).

    Args:
        size: Number of samples.
        seed: Seed of the order; None keeps the order of the dataset.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self._size = size
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sample]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self._seed is None:
            order = np.arange(self._size)
        else:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._size)
        return (Sample(epoch, int(image)) for image in order)


def training_loader(
    images: Samples, batch_size: int, seed: int, workers: int
) -> pytorch.DataLoader:
    """Shuffled batches of exactly `batch_size`; Determined repeats, shards and skips them.

    Raises:
        DataError: if there is not one whole batch: Determined would repeat the empty epoch forever.
    """
    if len(images) < batch_size:
        raise DataError(
            f"hyperparameters.global_batch_size: batches of {batch_size} are larger than the "
            f"training set of {len(images)} samples; use smaller batches"
        )
    return _loader(images, EpochSampler(len(images), seed), batch_size, workers, drop_last=True)


def validation_loader(
    images: Samples, batch_size: int, workers: int, slots: int
) -> pytorch.DataLoader:
    """Every sample once, in order; the last batch may be smaller.

    Raises:
        DataError: if there is not a batch for every slot, which Determined needs.
    """
    if math.ceil(len(images) / batch_size) < slots:
        raise DataError(
            f"hyperparameters.global_batch_size: batches of {batch_size} leave some of {slots} "
            f"slots without any of the {len(images)} validation samples; use smaller batches"
        )
    return _loader(images, EpochSampler(len(images), None), batch_size, workers, drop_last=False)


def _loader(
    images: Samples,
    sampler: EpochSampler,
    batch_size: int,
    workers: int,
    *,
    drop_last: bool,
) -> pytorch.DataLoader:
    return pytorch.DataLoader(
        _AsDataset(images),
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=_identity,
        # Without a generator of its own, a loader draws its workers' seed from the global one.
        generator=torch.Generator().manual_seed(0),
    )


class Loaders(ABC):
    """The training and the validation loader of one trial.

    Args:
        context: The trial's context.
        workers: Loader processes per slot; 0 loads in the training process.
    """

    def __init__(self, context: pytorch.PyTorchTrialContext, workers: int) -> None:
        context.experimental.disable_auto_to_device()  # it waits for every copy
        self._context = context
        self._workers = workers

    @abstractmethod
    def load(self, seed: int) -> tuple[Samples, Samples]:
        """The samples to train and to validate on."""

    @cached_property
    def samples(self) -> tuple[Samples, Samples]:
        """Loaded when first asked for, not by a mere inference."""
        return self.load(self._context.get_trial_seed())

    def training_loader(self) -> tuple[pytorch.DataLoader, int]:
        """The loader, and the batches that the chief trains per epoch.

        Raises:
            DataError: if there is not one whole batch.
        """
        size, seed = self._context.get_per_slot_batch_size(), self._context.get_trial_seed()
        loader = training_loader(self.samples[0], size, seed, self._workers)
        return loader, batches_per_epoch(loader, self._context.distributed.size)

    def validation_loader(self) -> pytorch.DataLoader:
        """Raises: DataError: if there is not a batch for every slot."""
        size, slots = self._context.get_per_slot_batch_size(), self._context.distributed.size
        return validation_loader(self.samples[1], size, self._workers, slots)


def data_section(cls: type[T], context: pytorch.PyTorchTrialContext) -> T:
    """The `data` section of the experiment, as `cls`.

    Raises:
        ConfigError: naming every mistake.
    """
    return read_section(cls, context.get_experiment_config().get("data") or {}, "data")


def batches_per_epoch(loader: pytorch.DataLoader, slots: int) -> int:
    """Batches that the chief trains per epoch: Determined deals whole batches to the slots."""
    return math.ceil(len(loader) / slots)


def to_device(batch: pytorch.TorchData, device: torch.device) -> Batch:
    """Copy a batch without waiting: asynchronous from pinned memory, which the loaders use.

    Determined's own copy waits for the device; call `disable_auto_to_device` and use this. Images
    of three channels become channels_last, the layout tensor cores convolve in.
    """
    images, labels = cast("Batch", batch)
    if images.shape[1] == 3:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class _AsDataset(Dataset[tuple[Any, ...]]):
    """`Samples` as the `Dataset` that Determined's loader insists on."""

    def __init__(self, images: Samples) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, samples: Sequence[Sample]) -> tuple[Any, ...]:
        return self._images.__getitems__(samples)


def _identity(batch: Any) -> Any:
    return batch
