"""Makes stand-ins for ImageNet's photos: noise at all scales, in files as large."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

# The mean of ImageNet's training set is about 500 x 375 pixels and 110 kB.
WIDTH, HEIGHT, QUALITY = 500, 375, 95
# Distance between random values, in pixels, and their standard deviation.
OCTAVES = ((125, 60.0), (32, 35.0), (8, 20.0), (2, 8.0), (1, 6.0))


def photo(seed: int) -> bytes:
    """Make a JPEG file in colour."""
    generator = np.random.default_rng(seed)
    pixels = np.full((HEIGHT, WIDTH, 3), 128.0, dtype=np.float32)
    for step, deviation in OCTAVES:
        coarse = generator.normal(
            scale=deviation, size=(3, HEIGHT // step + 2, WIDTH // step + 2)
        )
        for channel, values in enumerate(coarse.astype(np.float32)):
            enlarged = Image.fromarray(values).resize(
                (WIDTH, HEIGHT), Image.Resampling.BICUBIC
            )
            pixels[:, :, channel] += np.asarray(enlarged)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
        file, "JPEG", quality=QUALITY
    )
    return file.getvalue()


def write_photos(folder: Path, photos: list[bytes], copies: int) -> None:
    """Write photos for the dataset `image_folder`: two classes, some for validation.

    Args:
        folder: Where to write `train/CLASS/*.jpg` and `val/CLASS/*.jpg`.
        photos: The contents of the files.
        copies: Number of training copies of each photo.
    """
    for index, content in enumerate(photos):
        kind = f"class_{index % 2}"
        for part, count in (("train", copies), ("val", 1)):
            (folder / part / kind).mkdir(parents=True, exist_ok=True)
            for copy in range(count):
                (folder / part / kind / f"{index}_{copy}.jpg").write_bytes(content)
