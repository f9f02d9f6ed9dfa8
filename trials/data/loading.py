"""Loaders whose order and augmentation a resumed run continues exactly.

Determined resumes a trial in a new process, which skips the batches that were trained.
So order and augmentation must not depend on earlier random numbers. Here both depend on
(seed, epoch, image) only, for every number of ranks and loader workers.

With `pytorch.DataLoader(shuffle=True)` the order comes from the global generator. Then
it changes after a resume, and ranks with different generators train on shards that
overlap.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from determined import pytorch
from torch.utils.data import Dataset, Sampler
from torchvision import datasets
from typing_extensions import Self

from determined_amp import UserError
from determined_amp.experiment.experiment import data_of

# The most loader processes per slot: a mistyped number must not stop the machine.
MOST_WORKERS = 256

# Datasets that read a directory, and those whose size is a setting; names in the YAML.
_IN_A_DIRECTORY = ("mnist", "cifar10", "image_folder", "video_latents")
_NOISE = ("synthetic", "device_synthetic")

Batch = tuple[torch.Tensor, torch.Tensor]


class Sample(NamedTuple):
    """Which sample to load: the epoch, and the index of the image or clip."""

    epoch: int
    image: int


class Samples(Protocol):
    """A dataset that loads a whole batch at once, as a tuple."""

    def __len__(self) -> int: ...

    def __getitems__(self, samples: Sequence[Sample]) -> tuple[Any, ...]: ...


class Labelled(Samples, Protocol):
    """A dataset whose batches are (images or clips, labels in [0, classes)).

    If its attribute `on_device` is true, the batches are on the device already.
    """

    classes: int

    def __getitems__(self, samples: Sequence[Sample]) -> Batch: ...


FolderT = TypeVar("FolderT", bound=datasets.DatasetFolder)


class DatasetSettings:
    """What the `data` sections of images and of clips have in common."""

    dataset: enum.Enum
    classes: int
    directory: str | None
    workers: int

    @classmethod
    def of(cls, context: pytorch.PyTorchTrialContext) -> Self:
        """The `data` section of a trial's experiment.

        Raises:
            ConfigError: if it has mistakes; it names each of them.
        """
        return data_of(cls, context)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        """Yield (key, what is wrong) for keys that are missing or have no effect."""
        name = self.dataset.value
        if name in _IN_A_DIRECTORY and self.directory is None:
            yield "directory", f"missing; dataset {name} needs a directory"
        if name not in _IN_A_DIRECTORY and "directory" in given:
            yield "directory", f"given, but dataset {name} reads no directory"
        if name not in _NOISE and "samples" in given:
            yield "samples", f"given, but dataset {name} has its own size"

    def check_classes(self, found: Labelled) -> None:
        """Raise DataError if the dataset does not have `classes` classes."""
        if found.classes != self.classes:
            raise DataError(
                f"data.classes: got {self.classes}, but {self.dataset.value} has "
                f"{found.classes} classes; allowed: {found.classes}"
            )


class DataError(UserError):
    """The data differs from the settings, or there is too little of it."""


class EpochSampler(Sampler[Sample]):
    """Yields every sample once per epoch, in an order that depends on (seed, epoch).

    Args:
        size: Number of samples.
        seed: Seed of the order; None keeps the order of the dataset.
    """

    def __init__(self, size: int, seed: int | None) -> None:
        self._size = size
        self.seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sample]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self.seed is None:
            order = np.arange(self._size)
        else:
            order = np.random.default_rng((self.seed, epoch)).permutation(self._size)
        return (Sample(epoch, int(image)) for image in order)


def training_loader(
    images: Samples, batch_size: int, seed: int, workers: int
) -> pytorch.DataLoader:
    """Make a loader of shuffled batches, each of exactly `batch_size` samples.

    Determined repeats and shards them, and after a resume skips those already trained.

    Raises:
        DataError: if there is less than one batch, because Determined would repeat an
            empty epoch forever.
    """
    if len(images) < batch_size:
        raise DataError(
            f"hyperparameters.global_batch_size: batches of {batch_size} are larger "
            f"than the training set of {len(images)} samples; use smaller batches"
        )
    return _loader(
        images, EpochSampler(len(images), seed), batch_size, workers, drop_last=True
    )


def validation_loader(
    images: Samples, batch_size: int, workers: int, slots: int
) -> pytorch.DataLoader:
    """Make a loader of every sample once, in order; the last batch may be smaller.

    Raises:
        DataError: if there are fewer batches than slots; Determined needs at least one
            per slot.
    """
    if math.ceil(len(images) / batch_size) < slots:
        raise DataError(
            f"hyperparameters.global_batch_size: batches of {batch_size} leave some of "
            f"{slots} slots without any of the {len(images)} validation samples; use "
            "smaller batches"
        )
    return _loader(
        images, EpochSampler(len(images), None), batch_size, workers, drop_last=False
    )


def _loader(
    images: Samples,
    sampler: EpochSampler,
    batch_size: int,
    workers: int,
    *,
    drop_last: bool,
) -> pytorch.DataLoader:
    return pytorch.DataLoader(
        cast("Dataset[Any]", images),  # torch needs no subclass of Dataset
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available()
        and not getattr(images, "on_device", False),
        collate_fn=_identity,
        # Otherwise the loader draws a seed for its workers from the global generator.
        generator=torch.Generator().manual_seed(0),
    )


def batches_per_epoch(loader: pytorch.DataLoader, slots: int) -> int:
    """The batches that the chief trains per epoch: slots take whole batches in turn."""
    return math.ceil(len(loader) / slots)


def to_device(batch: Any, device: torch.device) -> tuple[Any, ...]:
    """Copy the tensors of a batch to the device; leave other values as they are.

    From pinned memory the copy is asynchronous. Determined's own copy would wait for
    the device; `disable_auto_to_device` turns it off. Pixels are copied as uint8, a
    quarter of the bytes of float32, and become float32 in [-1, 1] on the device.
    Images with three channels become channels_last, the layout that tensor cores use
    for convolutions.
    """
    return tuple(
        _copied(v, device) if isinstance(v, torch.Tensor) else v for v in batch
    )


def _copied(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    moved = value.to(device, non_blocking=True)
    if moved.dim() == 4 and moved.shape[1] == 3:
        moved = moved.contiguous(memory_format=torch.channels_last)
    return moved.float().div_(127.5).sub_(1.0) if moved.dtype is torch.uint8 else moved


def class_folders(root: Path, dataset: str, make: Callable[[str], FolderT]) -> FolderT:
    """Make torchvision's dataset of the files in `root/CLASS/`.

    Args:
        root: The folder that has a folder for each class.
        dataset: The name in the YAML, for the error message.
        make: Makes the dataset from the path of `root`.

    Raises:
        DataError: if `root` is not a folder, or a class in it has no file.
    """
    if not root.is_dir():
        raise DataError(
            f"data.directory: {root} is not a directory; {dataset} reads it"
        )
    try:
        return make(str(root))
    except FileNotFoundError as error:
        raise DataError(f"data.directory: {root}: {error}") from error


def check_same_classes(
    root: Path, train: Sequence[str], validation: Sequence[str]
) -> None:
    """Check that a label means the same class in training and in validation.

    Raises:
        DataError: if `root/train` and `root/val` have different class folders.
    """
    if train != validation:
        different = sorted({*train} ^ {*validation})
        raise DataError(
            f"data.directory: {root}/train and {root}/val have different class "
            f"folders: {', '.join(different)}"
        )


def _identity(batch: Any) -> Any:
    return batch
