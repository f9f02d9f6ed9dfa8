"""How long a training takes, and how long it waits for data."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch


class Stopwatch:
    """Times the work of a device by CUDA events, or by the clock on a CPU.

    Args:
        device: The device that works.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: Any = None

    @property
    def running(self) -> bool:
        return self._started is not None

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> None:
        self._started = None

    def seconds(self) -> float:
        """Seconds since `start`, 0 if it was not started; waits for the device."""
        if self._started is None:
            return 0.0
        now = self._now()
        if self._cuda:
            now.synchronize()
            return float(self._started.elapsed_time(now)) / 1000.0
        return float(now - self._started)

    def _now(self) -> Any:
        return _event() if self._cuda else time.perf_counter()


class DataWait:
    """Counts the seconds that a device was idle because the loop waited for a batch.

    On a GPU the host runs ahead: while it waits for a batch, the device may still compute the last
    one. So an event is recorded after each batch, and another one when the next batch has come. The
    part of the host's wait between the two events counts.

    Args:
        device: The device that may be idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: float | None = None
        self._begun: Any = None
        # For batches that may still be computed: the host's seconds, and both events.
        self._open: deque[tuple[float, Any, Any]] = deque()

    def begin(self) -> None:
        """A batch has been queued. No synchronisation."""
        if self._cuda:
            self._begun = _event()

    def end(self, seconds: float) -> None:
        """The next batch has come, after the host waited `seconds`. No synchronisation."""
        if not self._cuda:
            self._seconds = (self._seconds or 0.0) + seconds
        elif self._begun is not None:
            self._open.append((seconds, self._begun, _event()))
            while self._open and self._open[0][2].query():
                self._close()

    def seconds(self) -> float | None:
        """Idle seconds since `reset`; None before the first batch. Waits for the device."""
        while self._open:
            self._open[-1][2].synchronize()
            self._close()
        return self._seconds

    def reset(self) -> None:
        self._seconds = None
        self._begun = None
        self._open.clear()

    def _close(self) -> None:
        seconds, begun, ended = self._open.popleft()
        idle = begun.elapsed_time(ended) / 1000.0
        self._seconds = (self._seconds or 0.0) + min(seconds, idle)


def _event() -> Any:
    """Record an event after everything that has been queued."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
    event.record()
    return event
