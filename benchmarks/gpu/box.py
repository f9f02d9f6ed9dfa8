"""The time limit of a part, and the function with which all parts time a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.settings import Precision

# Time calls for about this long, because clocks and caches need a while to settle.
SECONDS = 0.6


@dataclass(frozen=True)
class Box:
    """The device and the time that a part may use.

    Args:
        device: The device to measure.
        tiny: Whether this is a rehearsal, with sizes that take a second or less.
        ends: When the part must end, by `time.monotonic`.
    """

    device: torch.device
    tiny: bool
    ends: float

    @property
    def amp(self) -> tuple[Precision, ...]:
        """The AMP precisions to measure; a part that needs only one takes the first."""
        if self.device.type == "cuda":
            return Precision.AMP_FP16, Precision.AMP_BF16
        # On a CPU, float16 convolutions take a hundred times as long.
        return (Precision.AMP_BF16,)

    def left(self) -> float:
        """Seconds left."""
        return self.ends - time.monotonic()


def stretch(step: Callable[[], object], box: Box) -> tuple[float, int | None]:
    """Time calls of `step`, for about `SECONDS`.

    Args:
        step: The function to time; one more call before warms it up.
        box: The device; a rehearsal times a single call.

    Returns:
        The mean seconds per call, and the peak bytes of tensors (None on a CPU).
    """
    alone = _timed(step, 1, box.device)
    calls = 1 if box.tiny else max(3, math.ceil(SECONDS / max(alone, 1e-6)))
    if box.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(box.device)
    seconds = _timed(step, calls, box.device) / calls
    peak = (
        torch.cuda.max_memory_allocated(box.device)
        if box.device.type == "cuda"
        else None
    )
    return seconds, peak


def _timed(step: Callable[[], object], calls: int, device: torch.device) -> float:
    """The seconds of all calls, by CUDA events or, on a CPU, by the clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return time.perf_counter() - start
    start_event, end_event = (_event() for _ in range(2))
    start_event.record()
    for _ in range(calls):
        step()
    end_event.record()
    end_event.synchronize()
    return float(start_event.elapsed_time(end_event)) / 1000.0


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here


def problem_of(error: Exception) -> str:
    """Shorten an error to one line, for a note."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
