"""Imported by the server that forks the workers of a search, and by nothing else."""

from __future__ import annotations

import atexit
import importlib
import os
from contextlib import suppress

# The first optimizer needs `_dynamo`, the first report tensorboard, the default data scikit-learn.
_OF_THE_WORKERS = (
    "determined_amp.search.workers",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "sklearn.datasets",
)

# Python's teardown takes seconds once torch is imported. Meanwhile the server would hold the
# standard output of a search that has ended, and its reader would wait.
atexit.register(os._exit, 0)

for _name in _OF_THE_WORKERS:
    with suppress(ImportError):
        importlib.import_module(_name)
