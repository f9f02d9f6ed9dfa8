"""Times a training."""

from __future__ import annotations

import time
from typing import Any

import torch


class Stopwatch:
    """Times the work of a device, with CUDA events or the clock of a CPU.

    Args:
        device: The device that works.

    Attributes:
        running: Whether it was started and not stopped since.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: Any = None
        self.running = False

    def start(self) -> None:
        self._started = self._now()
        self.running = True

    def stop(self) -> None:
        self.running = False

    def seconds(self) -> float:
        """Seconds since `start`, 0 if it is not running; waits for the device."""
        if not self.running:
            return 0.0
        now = self._now()
        if self._cuda:
            now.synchronize()
            return float(self._started.elapsed_time(now)) / 1000.0
        return float(now - self._started)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record()
        return event
