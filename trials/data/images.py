"""Datasets of images. The default has real images and needs no network."""

from __future__ import annotations

import enum
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision import datasets
from torchvision.transforms import v2

from determined_amp.amp.fields import setting
from trials.data.augment import crop_and_flip, uniform_numbers
from trials.data.loading import (
    MOST_WORKERS,
    Batch,
    DataError,
    DatasetSettings,
    Labelled,
    Sample,
    check_same_classes,
    class_folders,
    to_device,
)


class DatasetName(enum.Enum):
    """The source of the images.

    `digits`: the 1797 scanned handwritten digits of scikit-learn. `mnist`, `cifar10`:
    torchvision downloads them into `directory`, once per node. `image_folder`: the
    files in `directory/train/CLASS/` and `directory/val/CLASS/`. `synthetic`: noise, to
    measure throughput; a model can learn nothing from it. `device_synthetic`: one batch
    of noise, made on the device and used again and again. Its throughput is the limit
    for every loader.
    """

    DIGITS = "digits"
    MNIST = "mnist"
    CIFAR10 = "cifar10"
    IMAGE_FOLDER = "image_folder"
    SYNTHETIC = "synthetic"
    DEVICE_SYNTHETIC = "device_synthetic"


@dataclass(frozen=True)
class DataSettings(DatasetSettings):
    """The `data` section of an experiment.

    Args:
        dataset: The dataset.
        image_size: Side of the square images that the model gets, in pixels.
        channels: 1 for grey, 3 for colour. Images with another number of channels are
            repeated to 3, or averaged to 1.
        classes: Number of classes; must be that of the dataset.
        directory: The folder of `mnist`, `cifar10` or `image_folder`.
        workers: Loader processes per slot; 0 loads in the training process.
        samples: Number of training images of `synthetic` and `device_synthetic`; a
            tenth as many are for validation.
    """

    dataset: DatasetName = setting(DatasetName.DIGITS)
    image_size: int = setting(28, at_least=8)
    channels: int = setting(1, at_least=1, at_most=3)
    classes: int = setting(10, at_least=2)
    directory: str | None = setting(None)
    workers: int = setting(0, at_least=0, at_most=MOST_WORKERS)
    samples: int = setting(1280, at_least=10)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.channels == 2:
            yield "channels", "got 2; allowed: 1 (grey) or 3 (colour)"
        yield from super().contradictions(given)
        if self.dataset is DatasetName.DEVICE_SYNTHETIC and self.workers:
            yield (
                "workers",
                f"got {self.workers}, but device_synthetic loads nothing; allowed: 0",
            )


def load(
    settings: DataSettings, seed: int, device: torch.device | None = None
) -> tuple[Labelled, Labelled]:
    """Load the training and the validation images.

    Training images of `cifar10` and `image_folder` are augmented.

    Args:
        settings: The `data` section.
        seed: Seed of augmentation and noise.
        device: Where to make the images of `device_synthetic`; by default the CPU.

    Raises:
        DataError: if a directory is missing, or training, validation and `settings`
            disagree about the classes.
    """
    train: Labelled
    validation: Labelled
    if settings.dataset is DatasetName.DEVICE_SYNTHETIC:
        where = device or torch.device("cpu")
        train = DeviceNoise(settings.samples, settings, seed, where)
        validation = DeviceNoise(settings.samples // 10, settings, seed, where)
    elif settings.dataset is DatasetName.IMAGE_FOLDER:
        root = Path(str(settings.directory)).expanduser()
        train = FolderImages(root / "train", settings, seed)
        validation = FolderImages(root / "val", settings, None)
        check_same_classes(root, train.class_names, validation.class_names)
    else:
        classes = settings.classes if settings.dataset is DatasetName.SYNTHETIC else 10
        augment_seed = seed if settings.dataset is DatasetName.CIFAR10 else None
        of_training = _in_memory(settings, seed, train=True)
        of_validation = _in_memory(settings, seed, train=False)
        train = TensorImages(*of_training, classes, settings, augment_seed)
        validation = TensorImages(*of_validation, classes, settings)
    settings.check_classes(train)
    return train, validation


class TensorImages:
    """Images that fit in memory.

    Args:
        images: (N, C, H, W), uint8.
        labels: (N,), int64, in [0, classes).
        classes: Number of classes.
        settings: Size and channels of the batches.
        augment_seed: Seed of random crops and flips; None turns them off.
    """

    def __init__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        classes: int,
        settings: DataSettings,
        augment_seed: int | None = None,
    ) -> None:
        self.classes = classes
        self._labels = labels
        self._augment_seed = augment_seed
        side = settings.image_size
        if images.shape[-2:] != (side, side):
            images = v2.functional.resize(images, [side, side], antialias=True)
        self._images = _as_channels(images, settings.channels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, samples: Sequence[Sample]) -> Batch:
        """A batch: images (B, C, H, W) uint8, labels (B,) int64."""
        index = torch.tensor([sample.image for sample in samples])
        images = self._images[index]
        if self._augment_seed is not None:
            images = crop_and_flip(
                images, uniform_numbers(self._augment_seed, samples, draws=3)
            )
        return images, self._labels[index]


class FolderImages:
    """Photos in `root/CLASS/`, decoded batch by batch.

    Args:
        root: The folder that has a folder for each class.
        settings: Size and channels of the batches.
        augment_seed: Seed of random crops and flips (Szegedy et al. 2015, arXiv
            1409.4842); None resizes the photo and crops its centre.

    Raises:
        DataError: if `root` is not a folder, or a class in it has no photo.
    """

    def __init__(
        self, root: Path, settings: DataSettings, augment_seed: int | None
    ) -> None:
        self._folder = class_folders(root, "image_folder", datasets.ImageFolder)
        self.class_names = self._folder.classes
        self.classes = len(self.class_names)
        self._channels = settings.channels
        self._augment_seed = augment_seed
        side = settings.image_size
        shape: list[Callable[[object], object]]
        if augment_seed is None:
            shape = [v2.Resize(side * 8 // 7, antialias=True), v2.CenterCrop(side)]
        else:
            shape = [
                v2.RandomResizedCrop(side, antialias=True),
                v2.RandomHorizontalFlip(),
            ]
        self._transform = v2.Compose([*shape, v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self._folder)

    def __getitems__(self, samples: Sequence[Sample]) -> Batch:
        """A batch: images (B, C, H, W) uint8, labels (B,) int64."""
        decoded = [self._decode(sample) for sample in samples]
        images = _as_channels(
            torch.stack([image for image, _ in decoded]), self._channels
        )
        return images, torch.tensor([label for _, label in decoded])

    def _decode(self, sample: Sample) -> tuple[torch.Tensor, int]:
        try:
            image, label = self._folder[sample.image]
        except Exception as error:  # decoders raise errors of many types
            path, _ = self._folder.samples[sample.image]
            raise DataError(f"{path}: cannot be decoded: {error}") from error
        if self._augment_seed is None:
            return self._transform(image), label
        # torchvision draws from the global generator, so seed it for this sample.
        draw = uniform_numbers(self._augment_seed, [sample], draws=1)[0, 0]
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed the generators of the GPUs, too.
            torch.default_generator.manual_seed(int(draw * 2**53))
            return self._transform(image), label


class DeviceNoise:
    """One batch of noise on a device, to measure throughput without a loader.

    Args:
        count: Number of images that `len` reports.
        settings: Size, channels and classes.
        seed: Seed of the noise.
        device: Where the batch is made and stays.
    """

    on_device = True

    def __init__(
        self, count: int, settings: DataSettings, seed: int, device: torch.device
    ) -> None:
        self.classes = settings.classes
        self._count = count
        self._shape = (settings.channels, settings.image_size, settings.image_size)
        self._seed = seed
        self._device = device
        self._made: Batch | None = None

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, samples: Sequence[Sample]) -> Batch:
        """A batch: images (B, C, S, S) float32 in [-1, 1], labels (B,) int64, on the
        device.
        """
        size = len(samples)
        if self._made is None or len(self._made[1]) < size:
            draw: dict[str, Any] = {"device": self._device}
            draw["generator"] = torch.Generator(self._device).manual_seed(self._seed)
            images = torch.randint(
                0, 256, (size, *self._shape), dtype=torch.uint8, **draw
            )
            labels = torch.randint(0, self.classes, (size,), **draw)
            images, labels = to_device((images, labels), self._device)
            self._made = images, labels
        images, labels = self._made
        return images[:size], labels[:size]


def _as_channels(images: torch.Tensor, channels: int) -> torch.Tensor:
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.repeat(1, 3, 1, 1)
    return images.float().mean(dim=1, keepdim=True).round().to(images.dtype)


@cache
def digit_scans() -> tuple[
    tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]:
    """scikit-learn's scanned digits. The split is fixed: it does not depend on a seed.

    Returns:
        Scans (N, 8, 8) float32 in [0, 1] and labels (N,) int64: 1437 for training,
        360 for validation. Every call returns the same tensors; do not change them.
    """
    # Importing scikit-learn takes two seconds, and only the digits need it.
    from sklearn.datasets import load_digits  # noqa: PLC0415
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    bunch = load_digits()
    scans = torch.from_numpy(bunch.images).float() / 16.0
    labels = torch.from_numpy(bunch.target).long()
    train, validation = train_test_split(
        np.arange(len(labels)), test_size=360, random_state=0, stratify=bunch.target
    )
    return (scans[train], labels[train]), (scans[validation], labels[validation])


def _in_memory(
    settings: DataSettings, seed: int, *, train: bool
) -> tuple[torch.Tensor, Any]:
    """Images (N, C, H, W) uint8 and labels (N,) of a dataset that fits in memory."""
    if settings.dataset is DatasetName.DIGITS:
        scans, labels = digit_scans()[0 if train else 1]
        return (scans * 255.0).round().to(torch.uint8)[:, None], labels
    if settings.dataset is DatasetName.SYNTHETIC:
        count = settings.samples if train else settings.samples // 10
        generator = torch.Generator().manual_seed(seed + int(not train))
        shape = (count, settings.channels, settings.image_size, settings.image_size)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return pixels, torch.randint(0, settings.classes, (count,), generator=generator)
    is_grey = settings.dataset is DatasetName.MNIST
    download = datasets.MNIST if is_grey else datasets.CIFAR10
    with _node_lock(settings.dataset.value):
        raw = download(str(settings.directory), train=train, download=True)
    if is_grey:
        return raw.data[:, None], raw.targets
    pixels = torch.from_numpy(raw.data).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.tensor(raw.targets)


@contextmanager
def _node_lock(name: str) -> Iterator[None]:
    """Let one process per node download; the others wait, and then find the files."""
    with open(
        Path(tempfile.gettempdir()) / f"{name}-download-{os.getuid()}.lock", "w"
    ) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
