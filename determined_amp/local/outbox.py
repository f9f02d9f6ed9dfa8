"""Calls a server that may be away, in order, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from determined_amp.local.master import is_away

logger = logging.getLogger(__name__)

IDLE = 30.0  # seconds without a call after which `idle` is called
RETRY = 5.0  # seconds between two attempts while the server is away
TRIES = 3  # attempts at a call that fails while the server answers `idle`
PATIENCE = 20.0  # at the end, stop waiting after this many seconds without a delivery
HURRY = 2.0  # at the end, if hurried, stop waiting after this many seconds in all

_AWAY = "is away"
_FAILS = "fails at what it is sent"
_REFUSES = "refuses what it is sent"


class Outbox:
    """Calls functions on a thread of its own, and repeats a call while the server is away.

    A call that the server refuses is dropped, and so is one that fails `TRIES` times while the
    server answers `idle`. The calls after it are still made.

    Args:
        server: Name of the server, for warnings.
        idle: Called after every `IDLE` seconds without a call, and to tell whether the server is
            away or only a single call fails.
    """

    def __init__(self, server: str, idle: Callable[[], object]) -> None:
        self._server = server
        self._idle = idle
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._closed = threading.Event()
        self._delivered = True
        self._warned: set[str] = set()
        self._taken = 0

    def put(self, call: Callable[[], object]) -> None:
        """Queue a call; calls run in the order of `put`."""
        self._calls.put(call)

    @contextmanager
    def sending(self, hurried: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Inside this block make the queued calls; at its end wait for a while for the rest.

        Args:
            hurried: Tells whether somebody is waiting for the end.
        """
        thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        thread.start()
        try:
            yield
            self._calls.put(None)
            self._wait(thread, hurried)
        finally:
            self._closed.set()

    def _wait(self, thread: threading.Thread, hurried: Callable[[], bool]) -> None:
        began = delivered = time.monotonic()
        taken = self._taken
        while thread.is_alive():
            thread.join(0.1)
            now = time.monotonic()
            if self._taken > taken:
                delivered, taken = now, self._taken
            if now - delivered > PATIENCE or (hurried() and now - began > HURRY):
                break
        self._delivered &= not thread.is_alive()

    @property
    def all_delivered(self) -> bool:
        """Whether every call succeeded."""
        return self._delivered and self._calls.empty()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                call = self._calls.get(timeout=IDLE)
            except queue.Empty:
                call = self._idle
            if call is None:
                return
            self._delivered &= self._deliver(call)

    def _deliver(self, call: Callable[[], object]) -> bool:
        failures = 0
        while not self._closed.is_set():
            try:
                call()
            except Exception as error:  # no error of a call may end the run
                if not is_away(error):
                    self._warn(_REFUSES, error)
                    return False
                if not self._answers():
                    self._warn(_AWAY, error)
                elif (failures := failures + 1) == TRIES:
                    self._warn(_FAILS, error)
                    return False
                self._closed.wait(RETRY)
            else:
                self._warned.discard(_AWAY)
                self._taken += 1
                return True
        return False

    def _answers(self) -> bool:
        try:
            self._idle()
        except Exception as error:
            return not is_away(error)
        return True

    def _warn(self, trouble: str, error: Exception) -> None:
        if trouble not in self._warned:
            self._warned.add(trouble)
            said = str(error) or type(error).__name__
            logger.warning("%s %s, the run goes on: %s", self._server, trouble, said)
