"""Runs of a small MLP in this process, a few seconds' worth of Determined's loop; and
what a test reads of their folders.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import resource
import subprocess
import sys
import traceback
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torchvision.models.resnet import Bottleneck, ResNet

from determined_amp import __main__ as door
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import Values
from determined_amp.experiment.experiment import parse
from determined_amp.runs.folder import read_record
from trials.mlp import MLPTrial

ROOT = Path(__file__).parents[1]
SMALL = (
    "data.image_size=8",
    "hyperparameters.hidden_features=16",
    "hyperparameters.global_batch_size=32",
    "hyperparameters.training.max_length.batches=12",
    "hyperparameters.training.validation_period.batches=6",
    "hyperparameters.training.checkpoint_period.batches=4",
    "hyperparameters.training.reporting_period.batches=2",
)


# What others write for a trial of theirs, in Determined's own form.
STRANGE: Values = {
    "name": "strange",
    "entrypoint": "tests.strangers:Stranger",
    "hyperparameters": {"lr": 0.1},
    "searcher": {"name": "single", "metric": "val_loss", "max_length": {"batches": 12}},
    "min_validation_period": {"batches": 6},
    "min_checkpoint_period": {"batches": 4},
    "scheduling_unit": 2,
}


def problems_of(config, **options):
    """The problems of a configuration, none if it is an experiment."""
    try:
        parse(config, "test", **options)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def changing(config, *overrides):
    """The words of a command for a YAML of the repository with these overrides."""
    changes = [word for override in overrides for word in ("--config", override)]
    return [str(ROOT / "experiment_configs" / config), *changes]


def arguments(config, *overrides):
    """What `det-amp train` is given to train the small MLP."""
    return changing(config, *SMALL, *overrides)


def write_yaml(folder, config):
    """The path of an experiment's YAML in a folder."""
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def run(folder, *words):
    """Train in this process; the run folder."""
    assert door.run(["train", *words, "--run-folder", str(folder)]) == 0
    return folder


def run_small(config, folder, *overrides):
    """Train the small MLP in this process; the run folder."""
    return run(folder, *arguments(config, *overrides))


def resume(folder, *options):
    """Go on training in this process; the run folder."""
    assert door.run(["train", "--resume", str(folder), *options]) == 0
    return folder


class _Thin(Bottleneck):  # type: ignore[misc]  # torchvision is not typed
    """Hands on as many channels as it has, instead of four times as many."""

    expansion = 1


def thin_resnet(*blocks):
    """What makes a ResNet with so many blocks in each stage, and far fewer channels
    than usual.

    A CPU that has no kernels for float16 convolutions takes minutes for the usual one.
    """
    return partial(ResNet, _Thin, list(blocks), width_per_group=8)


class KilledError(Exception):
    """Ends a run in the middle."""


@contextmanager
def before_batch(number, do, trial=MLPTrial):
    """Meanwhile a trial of that class does this with itself when it comes to that
    batch, from 0.
    """
    original = trial.train_batch

    def train_batch(self, batch, epoch_idx, batch_idx):
        if batch_idx == number:
            do(self)
        return original(self, batch, epoch_idx, batch_idx)

    with patched(trial, "train_batch", train_batch):
        yield


@contextmanager
def killed_in_batch(number, trial=MLPTrial):
    """Meanwhile a run is lost when it comes to that batch, from 0; and one must be."""

    def kill(trial):
        raise KilledError("the machine burns")

    with before_batch(number, kill, trial), pytest.raises(KilledError):
        yield


@contextmanager
def no_file_larger_than(size):
    """Meanwhile the kernel refuses to write what would make a file larger, as on a full
    disk.

    Python ignores the signal that comes with it, so that the write fails with an error
    number.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fork(work, log):
    """Start `work` in a fork of this process, which has imported torch; its process id.

    The child writes to `log`, and ends with the status that `work` returns, or 1 after
    an error.
    """
    sys.stdout.flush()
    with warnings.catch_warnings():
        # of Python 3.12, about threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        with log.open("a", buffering=1) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout = sys.stderr = file
            warnings.resetwarnings()  # they are errors in a test alone
            torch.set_num_threads(1)
            gc.freeze()  # a look at what was imported would copy every page of it
            status = work() or 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def wait(child):
    """The exit status of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(*command, check=False, cwd=ROOT, **options):
    """What a Python program of the repository printed, and its status."""
    command = (sys.executable, *command)
    return subprocess.run(
        command, check=check, cwd=cwd, capture_output=True, text=True, **options
    )


@contextmanager
def locked_by_another_process(folder):
    """Another process holds the lock of a folder inside this block; its number."""
    # As `determined_amp.runs.folder.lock` does, without its seconds of imports.
    hold = (
        "import fcntl, os, sys, time; file = open(sys.argv[1], 'a+'); "
        "fcntl.lockf(file, fcntl.LOCK_EX); file.truncate(0); "
        "print(os.getpid(), file=file, flush=True); print('held', flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(folder / ".lock")],
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder.pid
        finally:
            holder.kill()


def checkpoint(folder, batches):
    """The content of one checkpoint."""
    path = folder / "checkpoints" / f"batch-{batches:08d}" / "state_dict.pth"
    return torch.load(path, map_location="cpu", weights_only=True)


def metrics(folder):
    """The reports of a run."""
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def end(folder):
    """How a run ended, why, and after how many batches its last report came."""
    run, reports = read_record(folder), metrics(folder)
    return (
        run.state.value,
        run.reason,
        max((line["batches"] for line in reports), default=0),
    )


MEASURED = {"samples_per_second", "watch_data_wait_share", "watch_peak_memory_mib"}


def computed(reports, *others):
    """Reports without what differs from run to run, speed, time and memory, and without
    these.
    """
    left_out = MEASURED.union(others)
    return [
        {name: value for name, value in report.items() if name not in left_out}
        for report in reports
    ]


def same_numbers(folder, *others):
    """The reports of a run, so far."""
    return computed(metrics(folder), *others)


def digest(state):
    """One hash of everything in a checkpoint: weights, optimizer, scaler, counts,
    random state.
    """
    if isinstance(state, torch.Tensor):
        dense = state.to_dense() if state.is_sparse else state
        numbers = dense.contiguous().numpy().tobytes()
        content = f"{state.dtype}{tuple(state.shape)}".encode() + numbers
    elif isinstance(state, dict):
        found = sorted((str(key), digest(value)) for key, value in state.items())
        content = str(found).encode()
    elif isinstance(state, (list, tuple)):
        content = str([digest(value) for value in state]).encode()
    else:
        content = repr(state).encode()
    return hashlib.sha256(content).hexdigest()
