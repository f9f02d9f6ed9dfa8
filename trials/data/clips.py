"""Datasets of video clips: moving digits, latents from a folder, or noise.

A clip is (C, F, S, S) float32: channels, frames, and the side of a square frame. The
default, moving digits, needs no file and no network. Each of its clips depends on
(seed, epoch, scan) only.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torchvision.transforms import v2

from determined_amp.amp.fields import setting
from trials.data.augment import uniform_numbers
from trials.data.images import digit_scans
from trials.data.latents import LatentFolder
from trials.data.loading import (
    MOST_WORKERS,
    Batch,
    DatasetSettings,
    Labelled,
    Sample,
    check_same_classes,
)

# Fixed, so that all trials have the same validation clips.
VALIDATION_SEED = 20240105


class ClipDataset(enum.Enum):
    """The source of the clips.

    `moving_digits`: scikit-learn's 1797 scanned digits, which move through the frame
    and bounce off its border. `video_latents`: the `.pt` and `.npy` files in
    `directory/train/CLASS/` and `directory/val/CLASS/`. `synthetic`: noise, to measure
    throughput; a model can learn nothing from it.
    """

    MOVING_DIGITS = "moving_digits"
    VIDEO_LATENTS = "video_latents"
    SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class ClipSettings(DatasetSettings):
    """The `data` section of an experiment on clips.

    Args:
        dataset: The dataset.
        image_size: Side of a frame, in pixels or in latent cells.
        channels: 1 for digits, 4 for the latents of Stable Diffusion's autoencoder.
        frames: Number of frames in a clip.
        classes: Number of classes; must be that of the dataset.
        directory: The folder of `video_latents`.
        workers: Loader processes per slot; 0 loads in the training process.
        samples: Number of training clips of `synthetic`; a tenth as many are for
            validation.
    """

    dataset: ClipDataset = setting(ClipDataset.MOVING_DIGITS)
    image_size: int = setting(12, at_least=4)
    channels: int = setting(1, at_least=1)
    frames: int = setting(6, at_least=1)
    classes: int = setting(10, at_least=1)
    directory: str | None = setting(None)
    workers: int = setting(0, at_least=0, at_most=MOST_WORKERS)
    samples: int = setting(1280, at_least=10)

    @property
    def clip_shape(self) -> tuple[int, int, int, int]:
        """The shape of a clip, (C, F, S, S)."""
        return self.channels, self.frames, self.image_size, self.image_size

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(given)
        if self.dataset is ClipDataset.MOVING_DIGITS:
            if self.channels != 1:
                yield (
                    "channels",
                    f"got {self.channels}, but moving_digits are grey; allowed: 1",
                )
            if self.image_size < 12:
                yield (
                    "image_size",
                    f"got {self.image_size}, in which no digit of two thirds of it is "
                    "legible; allowed: 12 or more",
                )


def load(settings: ClipSettings, seed: int) -> tuple[Labelled, Labelled]:
    """Load the training and the validation clips.

    Raises:
        DataError: if a directory is missing, a file has another shape, or training,
            validation and `settings` disagree about the classes.
    """
    train: Labelled
    validation: Labelled
    if settings.dataset is ClipDataset.MOVING_DIGITS:
        scans, few = digit_scans()
        train = MovingDigits(*scans, settings, seed, new_each_epoch=True)
        validation = MovingDigits(*few, settings, VALIDATION_SEED, new_each_epoch=False)
    elif settings.dataset is ClipDataset.VIDEO_LATENTS:
        root = Path(str(settings.directory)).expanduser()
        train = LatentFolder(root / "train", settings.clip_shape)
        validation = LatentFolder(root / "val", settings.clip_shape)
        check_same_classes(root, train.class_names, validation.class_names)
    else:
        train = SyntheticClips(settings.samples, settings, seed)
        validation = SyntheticClips(settings.samples // 10, settings, VALIDATION_SEED)
    settings.check_classes(train)
    return train, validation


class MovingDigits:
    """Clips of one scanned digit each, two thirds as large as the frame.

    A digit moves in a straight line and bounces off the border. Its start, direction
    and speed depend on (seed, epoch, scan) only. Per frame it moves by an eighth to a
    quarter of the free space.

    Args:
        scans: (N, H, W), float32 in [0, 1].
        labels: (N,), int64.
        settings: Size and frames of the clips.
        seed: Seed of the motion.
        new_each_epoch: Whether the motion of a scan differs between epochs.
    """

    classes = 10

    def __init__(
        self,
        scans: torch.Tensor,
        labels: torch.Tensor,
        settings: ClipSettings,
        seed: int,
        *,
        new_each_epoch: bool,
    ) -> None:
        self._side = settings.image_size
        self._frames = settings.frames
        digit = settings.image_size * 2 // 3
        if scans.shape[-1] != digit:
            scans = v2.functional.resize(
                scans[:, None], [digit, digit], antialias=True
            )[:, 0]
        self._scans = scans
        self._labels = labels
        self._seed = seed
        self._new_each_epoch = new_each_epoch

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, samples: Sequence[Sample]) -> Batch:
        """A batch: clips (B, 1, F, S, S) float32 in [-1, 1], labels (B,) int64."""
        if not self._new_each_epoch:
            samples = [Sample(0, sample.image) for sample in samples]
        index = torch.tensor([sample.image for sample in samples])
        tops, lefts = self._path(samples)
        rows, columns = self._placement(tops), self._placement(lefts)
        clips = torch.einsum("bfyi,bij,bfxj->bfyx", rows, self._scans[index], columns)
        return clips[:, None].mul_(2.0).sub_(1.0), self._labels[index]

    def _path(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The top and left edge of the digit in every frame, (2, B, F), in pixels."""
        room = self._side - self._scans.shape[-1]
        draws = torch.from_numpy(uniform_numbers(self._seed, samples, draws=4)).T[
            ..., None
        ]
        start, (angle, speed) = draws[:2] * room, draws[2:]
        angle = angle * (2 * np.pi)
        velocity = torch.stack([angle.sin(), angle.cos()]) * room * (1 + speed) / 8
        straight = start + velocity * torch.arange(self._frames)
        bounced: torch.Tensor = room - (room - straight.remainder(2 * room)).abs()
        return bounced.float()

    def _placement(self, offsets: torch.Tensor) -> torch.Tensor:
        """Interpolation weights (B, F, S, H) that shift a scan by `offsets` (B, F)."""
        frame = torch.arange(self._side)[:, None]
        scan = torch.arange(self._scans.shape[-1])
        return (1.0 - (frame - offsets[..., None, None] - scan).abs()).clamp_(min=0.0)


class SyntheticClips:
    """Clips of noise; each depends on the seed and its index only.

    Args:
        count: Number of clips.
        settings: Shape of the clips and number of classes.
        seed: Seed of the noise.
    """

    def __init__(self, count: int, settings: ClipSettings, seed: int) -> None:
        self.classes = settings.classes
        self._count = count
        generator = torch.Generator().manual_seed(seed)
        # Eight clips are enough, because throughput does not depend on their values.
        self._clips = torch.randn(
            (min(count, 8), *settings.clip_shape), generator=generator
        )

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, samples: Sequence[Sample]) -> Batch:
        """A batch: clips (B, C, F, S, S) float32, labels (B,) int64."""
        index = torch.tensor([sample.image for sample in samples])
        return self._clips[index % len(self._clips)], index % self.classes
