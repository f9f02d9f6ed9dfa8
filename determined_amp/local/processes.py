"""The processes of a local run: one, or those that torchrun started; and how they stop together."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import FrameType

import torch
from determined import core
from torch import distributed


@contextmanager
def process_group() -> Iterator[core.DistributedContext]:
    """Join the other processes of this run, if torchrun started several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield core.DummyDistributedContext()
        return
    # Determined wraps models in DistributedDataParallel only if its own launcher, or this, says so.
    os.environ["USE_TORCH_DISTRIBUTED"] = "True"
    # torch 2.3 hangs in a second group of the same process: one that is there is used.
    owned = not distributed.is_initialized()
    if owned:
        distributed.init_process_group(_backend())
    try:
        # Determined's default ports are fixed: a second run on the machine would meet the first.
        ports = _free_ports(2)
        distributed.broadcast_object_list(ports, src=0)
        yield core.DistributedContext(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
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


def _backend() -> str:
    """Of torch.distributed; with GPUs this process takes its own first, or all share the first."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


class StopOnSignal(core.DummyPreemptContext):
    """Stops a run as a cluster pauses a trial: at the next report, with a checkpoint.

    The first SIGINT or SIGTERM asks for that; a second SIGINT interrupts at once. The chief decides
    for all ranks.

    Args:
        processes: The processes of this run.

    Attributes:
        requested: Whether somebody wants the run to stop; set it to stop the run.
        obeyed: Whether the run was told so. A run that was not completes.
        reason: Who asked.
    """

    def __init__(self, processes: core.DistributedContext) -> None:
        super().__init__(processes)
        self._processes = processes
        self.requested = False
        self.obeyed = False
        self.reason = "asked to stop"

    @contextmanager
    def listening(self) -> Iterator[StopOnSignal]:
        """Take the two signals; only in the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def should_preempt(self, auto_ack: bool = True) -> bool:
        self.obeyed = bool(self._processes.broadcast(self.requested))
        return self.obeyed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.reason = f"stopped by {signal.Signals(number).name}"
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True


def _free_ports(count: int) -> list[int]:
    """Different ones: all are held until the last is found."""
    with ExitStack() as held:
        listeners = [held.enter_context(closing(socket.socket())) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
