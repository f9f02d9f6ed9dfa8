"""Measures how many photos one core decodes and augments for ResNet-50 at 224 px.

    python -m benchmarks.jpeg

It compares Pillow, which `image_folder` uses, with torchvision's decoder; both use
libjpeg-turbo. The decoders take turns, and times are processor times of one thread. The
result goes to `jpeg_cpu.json` in `--folder`.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL
import torch
import torchvision
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from benchmarks.measured import machine, markdown_table, parser_of, write
from benchmarks.photos import photo, write_photos
from determined_amp.cli.options import at_least
from trials.data.images import DatasetName, DataSettings, load
from trials.data.loading import Sample

SIDE = 224


def measure(photos: list[bytes], folder: Path, rounds: int) -> dict[str, list[float]]:
    """Measure milliseconds per photo of each way, in each round."""
    settings = DataSettings(DatasetName.IMAGE_FOLDER, SIDE, 3, 2, directory=str(folder))
    images, _ = load(settings, seed=0)
    samples = [Sample(0, index) for index in range(len(images))]
    augment = v2.Compose(
        [
            v2.RandomResizedCrop(SIDE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
        ]
    )
    cropped = [with_pillow(content).resize((SIDE, SIDE)) for content in photos]
    ways: dict[str, Callable[[], object]] = {
        "image_folder, a batch": lambda: images.__getitems__(samples),
        "Pillow: decode": lambda: list(map(with_pillow, photos)),
        "torchvision: decode": lambda: list(map(with_torchvision, photos)),
        "Pillow: decode and augment": lambda: [augment(with_pillow(p)) for p in photos],
        "torchvision: decode and augment": lambda: [
            augment(with_torchvision(p)) for p in photos
        ],
        "Pillow: flip": lambda: [
            p.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for p in cropped
        ],
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            found[name].append((time.process_time() - start) / len(photos) * 1e3)
    return found


def with_pillow(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def with_torchvision(content: bytes) -> torch.Tensor:
    file = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    pixels: torch.Tensor = decode_jpeg(file, mode=ImageReadMode.RGB)
    return pixels


def markdown(result: Mapping[str, Any]) -> str:
    """The table that `docs/resnet50.md` quotes."""
    rows = []
    for name, row in result["one_core"].items():
        low, high = row["ms_range"]
        times = f"{row['ms']:.2f} ({low:.2f} to {high:.2f})"
        rows.append([name, times, f"{row['images_per_second']:,}"])
    return markdown_table(
        ["one core", "ms per photo, median (range)", "photos/s"], rows
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("jpeg", "Measure how many photos one core decodes.", rounds=15)
    parser.add_argument("--photos", type=at_least(2), default=48, help="(48)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    photos = [photo(seed) for seed in range(options.photos)]
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), photos, copies=1)
        found = measure(photos, Path(folder), options.rounds)
    rows: dict[str, Any] = {}
    for name, times in found.items():
        middle = statistics.median(times)
        rows[name] = {
            "ms": round(middle, 3),
            "ms_range": [round(min(times), 3), round(max(times), 3)],
            "images_per_second": round(1e3 / middle),
        }
    same = all(
        torch.equal(v2.functional.pil_to_tensor(with_pillow(p)), with_torchvision(p))
        for p in photos
    )
    result = {
        **machine(),
        "torchvision": torchvision.__version__,
        "pillow": PIL.__version__,
        "photos": len(photos),
        "mean_kB": round(statistics.mean(map(len, photos)) / 1e3, 1),
        "rounds": options.rounds,
        "decoded_pixels_are_equal": same,
        "one_core": rows,
    }
    write(options.folder / "jpeg_cpu", result)
    print(markdown(result))


if __name__ == "__main__":
    main()
