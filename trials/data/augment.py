"""Augmentation as a function of random numbers, and the source of these numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trials.data.loading import Sample


def crop_and_flip(
    images: torch.Tensor, draws: NDArray[np.float64], padding: int = 4
) -> torch.Tensor:
    """The usual CIFAR augmentation (He et al. 2016, section 4.2).

    Args:
        images: (B, C, H, W).
        draws: (B, 3), uniform in [0, 1): vertical shift, horizontal shift, flip.
        padding: Zeros to add on every side before the crop, in pixels.

    Returns:
        (B, C, H, W), with the dtype of `images`.
    """
    side = images.shape[-1]
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top, left = (draws[:, :2] * (2 * padding + 1)).astype(np.int64).T
    span = torch.arange(side)
    rows = torch.from_numpy(top)[:, None] + span
    columns = torch.from_numpy(left)[:, None] + span
    flip = torch.from_numpy(draws[:, 2] < 0.5)[:, None]
    columns = torch.where(flip, columns.flip(1), columns)
    batch = torch.arange(len(images))[:, None, None]
    # The channels, between indexed dimensions, move to the end: (B, H, W, C).
    return (
        padded[batch, :, rows[:, :, None], columns[:, None, :]]
        .permute(0, 3, 1, 2)
        .contiguous()
    )


def uniform_numbers(
    seed: int, samples: Sequence[Sample], draws: int
) -> NDArray[np.float64]:
    """Draw numbers in [0, 1) that depend on (seed, epoch, image) only.

    The finaliser of splitmix64 (Steele et al. 2014, doi 10.1145/2660193.2660195)
    computes them from a counter. Each sample gets `draws` of them.

    Returns:
        (B, draws), float64.
    """
    keys = np.array(
        [(sample.epoch, sample.image) for sample in samples], dtype=np.uint64
    )
    with np.errstate(over="ignore"):
        # Mix one key after the other. Their sum would be the same for
        # (seed, image + 1) and (seed + 1, image).
        counter = _mix(np.full((1, 1), seed, dtype=np.uint64))
        for key in keys.T[:, :, None]:
            counter = _mix(counter + key)
        draw = np.arange(1, draws + 1, dtype=np.uint64)
        mixed = _mix((counter + draw).astype(np.uint64))
    numbers: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53
    return numbers


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
