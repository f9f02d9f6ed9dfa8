"""Measures the loader at 224 px, with images in memory and with photos to decode."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torchvision.io import ImageReadMode, decode_jpeg

from benchmarks.gpu import loops
from benchmarks.gpu.box import Box, problem_of, stretch
from benchmarks.loops import train_in_turns
from benchmarks.photos import photo, write_photos
from determined_amp.experiment.experiment import Experiment
from trials.data import images, loading

# Distinct photos, and copies of each: decoding takes the time, not the disk.
PHOTOS, COPIES = 128, 16
# How long to measure the loader alone.
SECONDS = 5.0


def measure(box: Box) -> Iterator[dict[str, Any]]:
    """Yield rows of `source`, `what`, `workers`, `round` and `images_per_second`."""
    cores = len(os.sched_getaffinity(0))
    workers = 1 if box.tiny else min(14, max(1, cores - 2))
    photos = [photo(seed) for seed in range(8 if box.tiny else PHOTOS)]
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder), photos, 2 if box.tiny else COPIES)
        sources: dict[str, dict[str, Any]] = {
            "synthetic": {"dataset": "synthetic", "samples": 40 if box.tiny else 2560},
            "image_folder": {
                "dataset": "image_folder",
                "directory": folder,
                "classes": 2,
            },
        }
        for source, data in sources.items():
            experiment = loops.experiment_of(
                box, box.amp[0], {**data, "workers": workers}
            )
            where = {"source": source, "workers": workers, "cores": cores}
            speed = _alone(experiment, box)
            yield {
                **where,
                "what": "loader alone",
                "round": 0,
                "images_per_second": speed,
            }
            training = {"training": partial(train_in_turns, experiment)}
            for row in loops.in_turns(box, box.amp[0], training, rounds=3):
                yield {**where, "what": row.pop("loop"), **row}
    if box.device.type == "cuda":
        yield {"source": "nvJPEG", "what": "decoding alone", **_nvjpeg(photos, box)}


def _alone(experiment: Experiment, box: Box) -> float:
    """Images per second of the loader alone, without training."""
    size, workers = loops.batch_size(box), experiment.data.workers
    samples, _ = images.load(experiment.data, experiment.seed)
    loader = loading.training_loader(samples, size, experiment.seed, workers)
    batches = iter(loader.get_data_loader(repeat=True))
    for _ in range(1 if box.tiny else 2 * workers):  # prefetched batches
        next(batches)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < (0.1 if box.tiny else SECONDS):
        next(batches)
        count += 1
    return size * count / (time.perf_counter() - start)


def _nvjpeg(photos: list[bytes], box: Box) -> dict[str, Any]:
    """Images per second decoded on the GPU; no dataset here does this."""
    files = [
        torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in photos
    ]

    def decode() -> None:
        decode_jpeg(files, mode=ImageReadMode.RGB, device="cuda")

    try:
        decode()
        seconds, _ = stretch(decode, box)
    except RuntimeError as error:  # this torchvision was built without nvJPEG
        return {"note": problem_of(error)}
    return {"round": 0, "images_per_second": len(files) / seconds}
