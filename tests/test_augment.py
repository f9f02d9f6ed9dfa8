"""`trials.data.augment`: crops and flips equal torchvision's, and their numbers are
their own.
"""

import math

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional

from trials.data.augment import crop_and_flip, uniform_numbers
from trials.data.loading import Sample


def cropped_and_flipped(images, draws, padding):
    """An image at a time, by torchvision."""
    side = images.shape[-1]
    made = []
    for image, (down, right, flip) in zip(images, draws, strict=True):
        top, left = (
            math.floor(draw * (2 * padding + 1)) - padding for draw in (down, right)
        )
        # outside of the image it is 0
        crop = functional.crop(image, top, left, side, side)
        made.append(functional.hflip(crop) if flip < 0.5 else crop)
    return made


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.uint8), (3, torch.float32)])
def test_crop_and_flip_equals_torchvisions(padding, channels, dtype):
    below_one = np.nextafter(1.0, 0.0)
    corners = [
        [0, 0, 0],
        [below_one, 0, 0.5],
        [0, below_one, below_one],
        [below_one] * 3,
    ]
    draws = np.concatenate([corners, np.random.default_rng(1).random((12, 3))])
    # 0 is the padding's colour
    images = torch.randint(1, 256, (16, channels, 8, 8)).to(dtype)
    before = images.clone()
    result = crop_and_flip(images, draws, padding)
    assert result.dtype is dtype
    assert torch.equal(result, torch.stack(cropped_and_flipped(images, draws, padding)))
    assert torch.equal(images, before)


def grid(epochs, images):
    return [Sample(epoch, image) for epoch in range(epochs) for image in range(images)]


def test_random_numbers_depend_on_the_sample_and_not_on_its_batch():
    samples = grid(3, 5)
    together = uniform_numbers(7, samples, draws=3)
    assert together.shape == (15, 3)
    for row, sample in zip(together, samples, strict=True):
        assert np.array_equal(uniform_numbers(7, [sample], draws=2), row[None, :2])
