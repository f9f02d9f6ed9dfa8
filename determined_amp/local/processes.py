"""Joins the processes of a local run that torchrun started, and stops them together."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from determined import core
from torch import distributed

from determined_amp.amp.errors import UserError
from determined_amp.amp.plain_data import Values
from determined_amp.local.ending import Ending
from determined_amp.runs.run import RunState

# Variables that torchrun sets in every process.
_OF_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)

# Said at the first signal.
_ANSWER = (
    "stopping at the next report, with a checkpoint; Ctrl-C once more stops at once"
)

# Takes the line of a report or of the training's start. Returns whether the run goes
# on.
GoesOn = Callable[[Values], bool]


@contextmanager
def process_group() -> Iterator[core.DistributedContext]:
    """Join the other processes of this run, if torchrun started more than one.

    Raises:
        UserError: if something else has set `WORLD_SIZE`, or there are too few GPUs.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        yield core.DummyDistributedContext()
        return
    # torch 2.3 hangs in a second group of the same process, so an existing one is used.
    owned = not distributed.is_initialized()
    missing = [name for name in _OF_TORCHRUN if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE: got {size!r} in the environment without "
            f"{', '.join(missing)}; allowed: what torchrun sets, or unset WORLD_SIZE "
            "to train in one process"
        )
    # Determined wraps models in DistributedDataParallel only under its own launcher, or
    # with this variable.
    os.environ["USE_TORCH_DISTRIBUTED"] = "True"
    if owned:
        distributed.init_process_group(_backend())
    try:
        yield _Processes.from_torch_distributed(os.environ.get("MASTER_ADDR"))
    finally:
        if owned:
            distributed.destroy_process_group()


class _Processes(core.DistributedContext):
    """The processes of a run, which communicate through free ports.

    Determined's default ports are fixed, so a second run on this machine would collide.
    """

    def __init__(self, **ranks: Any) -> None:
        with (
            socket.create_server(("", 0)) as one,
            socket.create_server(("", 0)) as other,
        ):
            ports = [server.getsockname()[1] for server in (one, other)]
        distributed.broadcast_object_list(ports, src=0)
        super().__init__(**ranks, pub_port=ports[0], pull_port=ports[1])


def _backend() -> str:
    """The backend of torch.distributed; also selects the GPU of this process."""
    if not torch.cuda.is_available():
        return "gloo"
    processes, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if processes > gpus:
        raise UserError(
            f"got {processes} processes for {gpus} GPUs; allowed: --nproc-per-node "
            f"{gpus}, or CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    # Without this, NCCL and Determined would put every process onto the first GPU.
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return "cpu:gloo,cuda:nccl"


@contextmanager
def on_stop_signals(
    handler: Callable[[int, FrameType | None], None],
    numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM),
) -> Iterator[None]:
    """Handle some signals inside this block; only in the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class StopOnSignal(core.DummyPreemptContext):
    """Stops a run as a cluster pauses a trial: at the next report, with a checkpoint.

    The first SIGINT or SIGTERM requests the stop, and a second SIGINT interrupts at
    once. A second SIGTERM does not, because torchrun adds a SIGTERM to the SIGINT of
    one Ctrl-C. The chief decides for all ranks.

    Args:
        processes: The processes of this run.
        goes_on: Asks a search whether the run goes on; None without a search.

    Attributes:
        processes: The processes.
        goes_on: Asks the search; None without one.
        asked: The ending of the run if it stops at the next report; None if it goes on.
        obeyed: Whether the loop has been told to stop.
    """

    def __init__(
        self, processes: core.DistributedContext, goes_on: GoesOn | None = None
    ) -> None:
        super().__init__(processes)
        self.processes = processes
        self.goes_on = goes_on
        self.asked: Ending | None = None
        self.obeyed = False

    def ask(self, line: Values) -> None:
        """Ask the search, at the start of the training and after each report."""
        if self.goes_on is not None and not self.goes_on(line):
            self.asked = RunState.PRUNED, "stopped early by the search"

    def should_preempt(self, auto_ack: bool = True) -> bool:
        self.obeyed = bool(self.processes.broadcast(self.asked is not None))
        return self.obeyed

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop, because of a signal; see `on_stop_signals`."""
        before = self.asked
        self.asked = RunState.STOPPED, f"stopped by {signal.Signals(number).name}"
        if before is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if before is None and self.goes_on is None and self.processes.rank == 0:
            # Not by print: the signal may have interrupted another print.
            with suppress(OSError):
                os.write(2, f"\n{_ANSWER}\n".encode())
