"""The device of `test_gpu.py`: a GPU, or in a dry run the CPU with stand-ins for CUDA's
own calls.

A dry run (`GPU_TESTS_ON_CPU=1 make test-gpu`) executes every line of those tests, so
that no mistake in them waits for a machine that has a GPU. What a stand-in cannot show
is marked where it is asserted: `only_a_gpu_shows`, `only_a_gpu_raises`; and `sized`
makes it small.
"""

import os
import time
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import TypeVar

# cuBLAS is deterministic only with this, which it reads when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from determined_amp.trial.mixed_precision import MixedPrecision
from tests import run_here

T = TypeVar("T")

DRY_RUN = "GPU_TESTS_ON_CPU" in os.environ
DEVICE = torch.device("cpu") if DRY_RUN else torch.device("cuda", 0)
GPUS = 0 if DRY_RUN else 1


def only_a_gpu_shows(fact):
    """Whether it is true; in a dry run it has been computed, and that is all."""
    return DRY_RUN or bool(fact)


def only_a_gpu_raises(error, match):
    """`pytest.raises`; in a dry run the block just runs."""
    return nullcontext() if DRY_RUN else pytest.raises(error, match=match)


def sized(on_a_gpu, in_a_dry_run):
    """The size of something."""
    return in_a_dry_run if DRY_RUN else on_a_gpu


@contextmanager
def stand_ins():
    """In a dry run, let what only CUDA has be answered by the host inside this
    block.
    """
    if not DRY_RUN:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in _CUDA.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(MixedPrecision, "__init__", _as_if_fused(MixedPrecision.__init__))
        # A convolution's backward in float16 takes a CPU a hundred times as long as in
        # float32.
        patch.setattr("trials.resnet50.resnet50", run_here.thin_resnet(1, 1, 1, 1))
        # The compiler makes kernels for a minute; graphs are captured all the same.
        patch.setattr(torch, "compile", partial(_without_kernels, torch.compile))
        yield


class _Event:
    """The clock of the host."""

    def __init__(self, enable_timing=False):
        self._time = 0.0

    def record(self):
        self._time = time.perf_counter()

    def synchronize(self):
        """It is over."""

    def elapsed_time(self, end):
        return 1000 * (end._time - self._time)


_CUDA = {
    "set_sync_debug_mode": lambda mode: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "reset_peak_memory_stats": lambda device=None: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 1,
    "Event": _Event,
}


def _as_if_fused(make):
    """Optimizers are fused, as on a GPU: other code steps them and finds the skips."""

    @wraps(make)
    def make_fused(amp, *given, **named):
        make(amp, *given, **named)
        amp.fused = True

    return make_fused


def _without_kernels(compiler, model, mode=None):
    return compiler(model, backend="aot_eager")
