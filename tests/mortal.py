"""Trials that fail, or leave their directory, for tests of searches."""

import errno
import os
from pathlib import Path

from trials.mlp import MLPTrial


class FullDiskTrial(MLPTrial):
    """Its run folder cannot be written any more, until the file `free` is there."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == 4 and not Path("free").exists():
            file = self.context.get_tensorboard_path() / "events"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return super().train_batch(batch, epoch_idx, batch_idx)


class LeavingTrial(MLPTrial):
    """Notes its process, a line in the file `pids` of the current directory, and leaves
    it.
    """

    def __init__(self, context):
        super().__init__(context)
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\n")
        Path("away").mkdir(exist_ok=True)
        os.chdir("away")


class OverflowingTrial(MLPTrial):
    """The forward overflows in float16, whatever the loss scale."""

    def __init__(self, context):
        super().__init__(context)
        for parameter in self.model.parameters():
            parameter.data.mul_(1.0e6)
