"""Starts the server that forks the trials of a search, and the runs of `check`."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing import forkserver

# The server imports these modules for the trials. The first optimizer needs `_dynamo`,
# the first report needs tensorboard, and the default data needs scikit-learn.
PRELOADED = (
    "determined_amp.search.trial_process",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "sklearn.datasets",
)


def start_server(*more: str) -> None:
    """Start the server that forks the trials. It imports `PRELOADED`, and the modules
    `more`, in the background.

    Importing torch and its dependencies takes 8 s. A process forked after that starts
    in 0.3 s. The server starts no threads and does not initialise CUDA, so its forks
    can do both. But importing Determined makes torch look for GPUs. By default torch
    asks CUDA, and then no fork could use a GPU. With the environment variable, torch
    asks the driver instead.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [*PRELOADED, *more]
    )
    # The server itself ignores SIGINT only after its imports. It inherits this handler,
    # so it ignores SIGINT from the start.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
