"""What pytest reads first. The process that hands tests to the workers of xdist runs
none: it needs no torch, whose import takes seconds.
"""

import os
import signal
from pathlib import Path

import pytest


def pytest_configure(config):
    """Hide GPUs from a run of anything but the GPU tests, and from the processes that
    it starts.

    Otherwise tests of the CPU would train on them, since a run takes the device that is
    there. A process that has started CUDA cannot hide them any more, so it is all or
    nothing.
    """
    # A shell has its background jobs ignore SIGINT, which the processes of tests would
    # inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Inherited by the processes that tests start. They find the repository wherever
    # they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than the cores this container has, since some tests wait; each imports
    torch.
    """
    # scikit-learn brings it
    import joblib  # type: ignore[import-untyped]  # noqa: PLC0415

    return min(8, int(joblib.cpu_count()) + 1)
