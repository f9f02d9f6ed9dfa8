"""Runs several training loops in one process by turns, so that noise affects all alike.

On a busy machine, the speed of a core changes from second to second, so loops that run
one after the other run at different speeds. These loops alternate every few batches.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

BATCHES_PER_TURN = 20
BATCHES_PER_ROUND = 100  # the default period of reports, so a round has one report


class Turns:
    """The turns of one loop, which runs in a thread of its own.

    Args:
        batches: Length of a turn, in batches.

    Attributes:
        times: Wall and CPU seconds of each turn; wall time includes work of the GPU.
        over: Whether the loop must end; the loop checks it after `batch_begins`.
    """

    def __init__(self, batches: int = BATCHES_PER_TURN) -> None:
        self.times: list[tuple[float, float]] = []
        self.over = False
        self._batches = batches
        self._batch = 0
        self._started = (0.0, 0.0)
        self._error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def batch_begins(self) -> None:
        """Call it before each batch: it ends a turn, and waits for the next one."""
        if self._batch % self._batches == 0:
            if self._batch:
                # Before `synchronize`, which may wait busily.
                cpu = time.thread_time()
                # Otherwise this work would run in the turn of the next loop.
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                wall = time.perf_counter()
                self.times.append((wall - self._started[0], cpu - self._started[1]))
            self._done.release()
            self._go.acquire()
            self._started = time.perf_counter(), time.thread_time()
        self._batch += 1

    @contextmanager
    def of(self, loop: Callable[[Turns], object]) -> Iterator[None]:
        """Start `loop`, wait for its first batch, and end it when the block ends."""
        thread = threading.Thread(target=self._run, args=(loop,))
        thread.start()
        try:
            self._wait()
            yield
        finally:
            self.over = True
            self._go.release()
            thread.join()

    def take(self) -> None:
        """Run one turn of the loop; raise an error of the loop here."""
        self._go.release()
        self._wait()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error:
            raise self._error

    def _run(self, loop: Callable[[Turns], object]) -> None:
        try:
            loop(self)
        except BaseException as error:
            # The thread that waits for the turn raises it again.
            self._error = error
        finally:
            self._done.release()


def by_turns(
    loops: dict[str, Callable[[Turns], object]],
    rounds: int,
    batches: int = BATCHES_PER_TURN,
) -> dict[str, Turns]:
    """Give each loop `rounds` turns of `batches`; each round reverses the order."""
    turns = {name: Turns(batches) for name in loops}
    with ExitStack() as running:
        for name, loop in loops.items():
            running.enter_context(turns[name].of(loop))
        order = list(loops)
        for _ in range(rounds):
            for name in order:
                turns[name].take()
            order.reverse()
    return turns
