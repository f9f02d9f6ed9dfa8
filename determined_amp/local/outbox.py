"""Calls a server that may be away, in order, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from determined_amp.local.master import is_away

logger = logging.getLogger(__name__)

IDLE = 60.0  # seconds without a call, then `idle` is called
RETRY = 5.0  # seconds between two attempts while the server is away
PATIENCE = 20.0  # at the end, stop waiting after this many seconds without a delivery

_AWAY = "is away"
_REFUSES = "refuses what it is sent"


class Outbox:
    """Calls functions on a thread of its own, and repeats a call while the server is away.

    Args:
        server: Name of the server, for warnings.
        idle: Called after every `IDLE` seconds without a call.
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
    def sending(self) -> Iterator[None]:
        """Inside this block make the queued calls; at its end wait for a while for the rest."""
        thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._calls.put(None)
            taken = -1
            while thread.is_alive() and taken < self._taken:
                taken = self._taken
                thread.join(PATIENCE)
            self._delivered &= not thread.is_alive()
            self._closed.set()

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
        while not self._closed.is_set():
            try:
                call()
            except Exception as error:  # no error of a call may end the run
                self._warn(error)
                if not is_away(error):
                    return False
                self._closed.wait(RETRY)
            else:
                self._warned.discard(_AWAY)
                self._taken += 1
                return True
        return False

    def _warn(self, error: Exception) -> None:
        trouble = _AWAY if is_away(error) else _REFUSES
        if trouble not in self._warned:
            self._warned.add(trouble)
            said = str(error) or type(error).__name__
            logger.warning("%s %s, the run goes on: %s", self._server, trouble, said)
