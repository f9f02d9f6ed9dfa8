"""A trial whose process can be made to die or to fail, once or always, for tests of searches."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

from trials.mlp import MLPTrial

# A file of this name in the current directory says what happens at the 5th batch.
ORDER = Path("order")


class MortalTrial(MLPTrial):
    """As its base, until there is an order."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, float]:
        if batch_idx == 4 and ORDER.exists():
            order = ORDER.read_text()
            if order == "die once":
                ORDER.unlink()
            if order.startswith("die"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"as ordered at {time.monotonic()}")
        return super().train_batch(batch, epoch_idx, batch_idx)


class FullDiskTrial(MLPTrial):
    """Its run folder cannot be written any more, until the file `free` is there."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, float]:
        if batch_idx == 4 and not Path("free").exists():
            file = self.context.get_tensorboard_path() / "events"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return super().train_batch(batch, epoch_idx, batch_idx)


class PidTrial(MLPTrial):
    """Notes the process it is made in, a line in the file `pids` of the current directory."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\n")


class LeavingTrial(MLPTrial):
    """Makes a folder in the current directory, and goes there."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        Path("away").mkdir(exist_ok=True)
        os.chdir("away")


class OverflowingTrial(MLPTrial):
    """The forward overflows in float16, whatever the loss scale."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        for parameter in self.model.parameters():
            parameter.data.mul_(1.0e6)
