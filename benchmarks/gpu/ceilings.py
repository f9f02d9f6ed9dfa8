"""Measures limits of the device: matmuls, copies in its memory, copies to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.box import Box, stretch

ROUNDS = 5
# Bytes that the loader sends for 256 images of 224 x 224 pixels.
BATCH_BYTES = 256 * 3 * 224 * 224


def measure(box: Box) -> Iterator[dict[str, Any]]:
    """Yield rows of `what`, `unit`, `round` and `value`."""
    size, megabytes = (128, 1) if box.tiny else (8192, 1024)
    pinned = box.device.type == "cuda"
    left, right = (
        torch.randn(size, size, device=box.device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    source = torch.randint(
        0, 256, (megabytes * 2**20,), device=box.device, dtype=torch.uint8
    )
    target = torch.empty_like(source)
    host = torch.randint(
        0, 256, (source.numel() // 4,), dtype=torch.uint8, pin_memory=pinned
    )
    batch = torch.zeros(BATCH_BYTES, dtype=torch.uint8, pin_memory=pinned)

    def to_device(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: target[: tensor.numel()].copy_(tensor, non_blocking=True)

    if target.numel() < BATCH_BYTES:
        batch = batch[: target.numel()]
    # Each name, step and unit, and the amount of a step in it; 0 reports milliseconds.
    measured: list[tuple[str, Callable[[], object], str, float]] = [
        (
            "bf16 matmul",
            lambda: torch.mm(left, right, out=out),
            "TFLOP/s",
            2 * size**3 / 1e12,
        ),
        (
            "device copy, read and written",
            lambda: target.copy_(source),
            "GB/s",
            2 * source.numel() / 1e9,
        ),
        ("pinned host to device", to_device(host), "GB/s", host.numel() / 1e9),
        ("256 images of 224 px to the device", to_device(batch), "ms", 0.0),
    ]
    for number in range(2 if box.tiny else ROUNDS):
        for what, step, unit, amount in measured:
            step()
            seconds, _ = stretch(step, box)
            value = amount / seconds if amount else seconds * 1e3
            yield {"what": what, "unit": unit, "round": number, "value": value}
