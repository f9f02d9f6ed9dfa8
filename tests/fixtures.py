"""What every test runs with: a fixed seed, one thread, and a skip where there is no
CUDA device.
"""

import atexit
import enum
import gc
import importlib
import json
import logging
import multiprocessing
import os
import pickle
import random
import sys
import warnings
from functools import cache
from multiprocessing import forkserver

import numpy as np
import pytest
import torch
from alembic import util as alembic_util
from determined import core
from sqlalchemy import event
from sqlalchemy.engine import Engine

from determined_amp import __main__ as door
from determined_amp.check import doctor, scratch, watching
from determined_amp.search import server, trial_process

gc.disable()  # until all tests are imported
# Libraries that count what they leak would count all of it. Not before pytest has
# looked for what tests have left, which would look at what was imported, too.
atexit.register(gc.unfreeze)


def pytest_configure(config):
    """Change what would make all tests wait."""
    # The loader of a run that an error ended is collected at a random later moment, and
    # waits so many seconds for each of its workers: 5 by default.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    if config.getoption("markexpr") != "gpu":
        # a seed for later has the call stack with it
        for device in ("cuda", "xpu", "mtia"):
            if hasattr(torch, device):  # torch 2.3 has no mtia
                getattr(torch, device).manual_seed_all = lambda seed: None


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory):
    """An empty working directory: the loop copies all code that is in it into every
    checkpoint.

    TensorBoard's thread may write after a test has gone back to it, so its folder is
    absolute.
    """
    empty = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(empty)
        patch.setattr(
            core.DummyTrainContext,
            "get_tensorboard_path",
            lambda self: self._tbd_directory or empty.parent / "tensorboard",
        )
        yield


@pytest.fixture(scope="session", autouse=True)
def _studies_are_made_at_once():
    """Optuna waits for the disk at each commit, and reads its migrations again for each
    study. No test loses what a process has written, as a machine without power would.
    """

    def write_later(connection, record):
        connection.execute("PRAGMA synchronous=OFF")

    event.listen(Engine, "connect", write_later)
    with pytest.MonkeyPatch.context() as patch:
        load = cache(alembic_util.load_python_file)
        patch.setattr(alembic_util, "load_python_file", load)
        yield
    event.remove(Engine, "connect", write_later)


@pytest.fixture(autouse=True)
def _seeded():
    """The same random numbers whichever tests ran before; one thread sums in one
    order.
    """
    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed also writes down the call stack
    torch.default_generator.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _levels_restored():
    """Determined's harness and the task of a comparison change what is logged, for
    good.
    """
    loggers = [logging.getLogger(), logging.getLogger("determined.tensorboard")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _unconfined(monkeypatch):
    """The process of the tests writes where it wants: a confined one would stay so."""
    monkeypatch.setattr(scratch, "confine", lambda folders: None)


@pytest.fixture
def _deterministic():
    """Kernels that give the same numbers every time, and NaN in memory that nothing has
    written.
    """
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _switches_restored():
    """Torch's switches of TF32 are afterwards what they were."""
    matmul, cudnn = (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
    )
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty checkpoint folder; the loop copies the working directory into every
    checkpoint.
    """
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.fixture
def _in_tmp_path(tmp_path, monkeypatch):
    """The working directory is the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def refusal(capsys):
    """Runs a command that has to end with status 2 and no traceback; what it says."""

    def of(*command):
        assert door.main([*command]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return of


@pytest.fixture(scope="module")
def _workers_are_forks():
    """Trials of a search, and the runs of `check`, are forks of this process, which has
    imported what they need; with the server of forks each worker would import it again.
    """
    for module in (*server.PRELOADED, "sklearn.model_selection", "trials.mlp"):
        importlib.import_module(module)
    serve, enter = trial_process._serve, doctor._enter
    forks = multiprocessing.get_context("fork")

    def begin(connection, *job):
        warnings.resetwarnings()  # they are errors in a test alone
        serve(connection, *pickle.loads(pickle.dumps(job)))  # as the server gets it

    def begin_probe(*given):
        warnings.resetwarnings()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not those of capsys
        enter(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial_process, "_serve", begin)
        patch.setattr(trial_process, "_processes", forks)
        patch.setattr(doctor, "_enter", begin_probe)
        patch.setattr(multiprocessing, "get_context", lambda method=None: forks)
        patch.setattr(forkserver, "ensure_running", lambda: None)
        yield


@pytest.fixture(scope="module")
def _libraries_are_collected_once():
    """The doctor looks at all objects when it begins: not at those of torch again."""
    with watching():
        pass  # it imports more of torch
    gc.collect()
    gc.freeze()


# Files that take longest, started first: workers that end together leave no core idle.
LONGEST = (
    "wrong_scripts right_scripts check check_scripts contract package torch_alone "
    "optimize resume unmodified two_scales compiled never_waits refusals compare "
    "finder imports confinement any_value processes startup_hook peers "
    "precision_report study"
)


# Of the characters of a container, which a report shows with the name of the test.
LONGEST_ID = 60


def pytest_collection_finish():
    """Keep the garbage collector from looking at what was imported, millions of
    objects, again.
    """
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(val, argname):
    """Plain values with their name, `steps=9`, and words for what pytest would call
    `dtype0`.

    Workers of pytest-xdist compare these, so nothing has an address or an order of its
    own in it.
    """
    if isinstance(val, enum.Enum):
        return str(val.value)
    if isinstance(val, (torch.dtype, torch.device)):
        return str(val).removeprefix("torch.")
    if isinstance(val, str):
        return None
    try:
        json.dumps(val)
    except TypeError:
        return None
    return f"{argname}={val}" if len(str(val)) <= LONGEST_ID else None


def pytest_collection_modifyitems(items):
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    # see tests/gpu.py
    if torch.cuda.is_available() or "GPU_TESTS_ON_CPU" in os.environ:
        return
    reason = (
        "needs a CUDA device, and `-m gpu`, without which it is hidden: make test-gpu"
    )
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
