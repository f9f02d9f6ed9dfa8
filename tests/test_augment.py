"""`trials.data.augment`: crops and flips equal a plain loop, and their numbers are their own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trials.data.augment import crop_and_flip, uniform_numbers
from trials.data.loading import Sample


def cropped_and_flipped(
    images: torch.Tensor, draws: NDArray[np.float64], padding: int
) -> torch.Tensor:
    """A pixel at a time, from the definition."""
    out = torch.zeros_like(images)
    side = images.shape[-1]
    for b, (down, right, flip) in enumerate(draws):
        for row in range(side):
            for column in range(side):
                y = row + math.floor(down * (2 * padding + 1)) - padding
                x = side - 1 - column if flip < 0.5 else column
                x += math.floor(right * (2 * padding + 1)) - padding
                if 0 <= y < side and 0 <= x < side:
                    out[b, :, row, column] = images[b, :, y, x]
    return out


def photos(count: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """No pixel is 0, which is the colour of the padding."""
    return torch.randint(1, 256, (count, channels, 8, 8)).to(dtype)


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize(("channels", "dtype"), [(1, torch.uint8), (3, torch.float32)])
def test_crop_and_flip_equals_a_plain_loop(padding: int, channels: int, dtype: torch.dtype) -> None:
    below_one = np.nextafter(1.0, 0.0)
    corners = [[0, 0, 0], [below_one, 0, 0.5], [0, below_one, below_one], [below_one] * 3]
    draws = np.concatenate([corners, np.random.default_rng(1).random((12, 3))])
    images = photos(16, channels, dtype)
    before = images.clone()
    result = crop_and_flip(images, draws, padding)
    assert result.dtype is dtype
    assert result.shape == images.shape
    assert torch.equal(result, cropped_and_flipped(images, draws, padding))
    assert torch.equal(images, before)
    # Negative control: no image is the same under the draw of its neighbour.
    other = cropped_and_flipped(images, np.roll(draws, 1, axis=0), padding)
    assert not any(map(torch.equal, result, other))


def grid(epochs: int, images: int) -> list[Sample]:
    return [Sample(epoch, image) for epoch in range(epochs) for image in range(images)]


def test_numbers_are_of_the_sample_whatever_its_batch() -> None:
    samples = grid(3, 5)
    together = uniform_numbers(7, samples, draws=3)
    assert together.dtype == np.float64
    assert together.shape == (15, 3)
    assert np.array_equal(uniform_numbers(7, samples[::-1], draws=3), together[::-1])
    for row, sample in zip(together, samples, strict=True):
        assert np.array_equal(uniform_numbers(7, [sample], draws=3), row[None])
        assert np.array_equal(uniform_numbers(7, [sample], draws=1), row[None, :1])


def kolmogorov(numbers: NDArray[np.float64]) -> float:
    """sqrt(n) times the greatest distance between the distribution and the uniform one."""
    ordered = np.sort(numbers.ravel())
    rank = np.arange(len(ordered) + 1) / len(ordered)
    distance = max(np.max(rank[1:] - ordered), np.max(ordered - rank[:-1]))
    return float(distance * math.sqrt(len(ordered)))


def test_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = uniform_numbers(2**64 - 1, grid(10, 1000), draws=3)
    assert len(np.unique(numbers)) == numbers.size
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    # Exceeded by one uniform sample in a thousand (Kolmogorov); these numbers never change.
    assert kolmogorov(numbers) < 1.95
    assert kolmogorov(numbers**1.1) > 1.95  # negative control
    centred = (numbers - 0.5).reshape(10, 1000, 3)
    neighbours = [
        (centred[:, :, :-1], centred[:, :, 1:]),
        (centred[:, :-1], centred[:, 1:]),
        (centred[:-1], centred[1:]),
    ]
    for a, b in neighbours:
        # The mean product of n independent pairs has standard deviation 1 / (12 sqrt(n)).
        assert abs(np.mean(a * b)) < 4 / (12 * math.sqrt(a.size))
