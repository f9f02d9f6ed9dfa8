"""The processes of a local run, which torchrun may have started, and how they stop together."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from determined import core
from torch import distributed

from determined_amp.amp.errors import UserError

# Seconds between two signals that make the second one another request.
APART = 5.0

# Variables that torchrun sets in every process.
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_OF_A_NEW_GROUP = ("MASTER_ADDR", "MASTER_PORT")


@contextmanager
def process_group() -> Iterator[core.DistributedContext]:
    """Join the other processes of this run, if torchrun started more than one.

    Raises:
        UserError: if `WORLD_SIZE` is set by something else.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        yield core.DummyDistributedContext()
        return
    # torch 2.3 hangs in a second group of the same process, so an existing one is used.
    owned = not distributed.is_initialized()
    _check_environment(size, (*_OF_TORCHRUN, *(_OF_A_NEW_GROUP if owned else ())))
    # Determined wraps models in DistributedDataParallel only under its own launcher, or with this.
    os.environ["USE_TORCH_DISTRIBUTED"] = "True"
    if owned:
        distributed.init_process_group(_backend())
    try:
        # Determined's default ports are fixed, so a second run on this machine would collide.
        ports = _free_ports(2)
        distributed.broadcast_object_list(ports, src=0)
        yield _Processes(
            _gpu(),
            rank=int(os.environ["RANK"]),
            size=int(size),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            cross_rank=int(os.environ["GROUP_RANK"]),
            cross_size=int(os.environ["GROUP_WORLD_SIZE"]),
            chief_ip=os.environ.get("MASTER_ADDR"),
            pub_port=ports[0],
            pull_port=ports[1],
        )
    finally:
        if owned:
            distributed.destroy_process_group()


def _check_environment(size: str, needed: Sequence[str]) -> None:
    missing = [name for name in needed if not os.environ.get(name)]
    if missing or not size.isdecimal() or size == "0":
        without = f" without {', '.join(missing)}" if missing else ""
        raise UserError(
            f"WORLD_SIZE: got {size!r} in the environment{without}; allowed: what torchrun sets, "
            "or unset WORLD_SIZE to train in one process"
        )


class _Processes(core.DistributedContext):
    """The processes of a run, of which several may share a GPU.

    Args:
        gpu: The GPU of this process. Determined takes the GPU whose number is `local_rank`.
        ranks: The arguments of `DistributedContext`.
    """

    def __init__(self, gpu: int | None, **ranks: Any) -> None:
        self._local_rank: int = ranks["local_rank"]
        super().__init__(**ranks)
        if gpu is not None:
            self.local_rank = gpu

    def get_local_rank(self) -> int:
        """Determined calls this to tell processes apart, so it is the rank and not the GPU."""
        return self._local_rank


def _gpu() -> int | None:
    """The GPU of this process; None without any."""
    if not torch.cuda.is_available():
        return None
    return int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()


def _backend() -> str:
    """The backend of torch.distributed; also selects the GPU of this process."""
    gpu = _gpu()
    if gpu is None:
        return "gloo"
    torch.cuda.set_device(gpu)
    # NCCL refuses two processes on one GPU.
    shared = int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count()
    return "gloo" if shared else "cpu:gloo,cuda:nccl"


@contextmanager
def on_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM inside this block; only in the main thread."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class StopOnSignal(core.DummyPreemptContext):
    """Stops a run as a cluster pauses a trial: at the next report, with a checkpoint.

    The first SIGINT or SIGTERM requests the stop; a second one interrupts at once. SIGTERM counts
    as the second only `APART` seconds after the first: on one Ctrl-C the terminal sends SIGINT to
    every process, and torchrun adds SIGTERM. The chief decides for all ranks.

    Args:
        processes: The processes of this run.

    Attributes:
        requested: Whether to stop at the next report; set it to stop the run.
        obeyed: Whether the loop has been told to stop.
        reason: Why it stopped, for the record of the end.
        answer: Text to print at the first signal; None prints nothing.
    """

    def __init__(self, processes: core.DistributedContext) -> None:
        super().__init__(processes)
        self._processes = processes
        self.requested = False
        self.obeyed = False
        self.reason = "asked to stop"
        self.answer: str | None = None
        self._asked_at = math.inf

    @contextmanager
    def listening(self) -> Iterator[StopOnSignal]:
        """Handle the signals inside this block; only in the main thread."""
        with on_stop_signals(self._on_signal):
            yield self

    def should_preempt(self, auto_ack: bool = True) -> bool:
        self.obeyed = bool(self._processes.broadcast(self.requested))
        return self.obeyed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = f"stopped by {signal.Signals(number).name}"
        now = time.monotonic()
        if self.requested and (number == signal.SIGINT or now >= self._asked_at + APART):
            raise KeyboardInterrupt
        if not self.requested and self.answer is not None:
            # Not by print: the signal may have interrupted another print.
            with suppress(OSError):
                os.write(2, f"\n{self.answer}\n".encode())
        if not self.requested:
            self._asked_at = now
        self.requested = True


def _free_ports(count: int) -> list[int]:
    """Free ports, all different: each stays bound until all are found."""
    with ExitStack() as held:
        listeners = [held.enter_context(closing(socket.socket())) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
