"""Describes the machine of a run. Reports compare only runs on equal machines, and
read a description without torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from determined_amp.amp.plain_data import Values

if TYPE_CHECKING:
    import torch

_UNKNOWN = "unknown"
_PACKAGES = ("torchvision", "determined", "numpy")


@dataclass(frozen=True)
class Machine:
    """The machine of a run, as far as it is known."""

    # The device in words; runs are compared only if these words are equal.
    device: str = _UNKNOWN
    slots: int = 1  # number of processes, each with such a device
    on_gpu: bool = False  # whether the device is a GPU
    has_tf32: bool = False  # whether the device has TF32; if not, `tf32` is `fp32`
    torch: str = _UNKNOWN  # version of torch
    versions: Values = field(default_factory=dict)  # other versions, by name

    @property
    def facts(self) -> Values:
        """The facts that must be equal for a fair comparison of two runs, by name."""
        return {name: getattr(self, name) for name in ("device", "slots", "torch")}

    @staticmethod
    def of_this_process(slots: int = 1) -> Machine:
        """The machine that this process trains on, with all that is known of it."""
        import torch  # noqa: PLC0415

        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        versions = {
            "python": platform.python_version(),
            **{name: installed_version(name) for name in _PACKAGES},
            "platform": platform.platform(),
            "commit": _commit(),
        }
        return machine_of(device, slots, versions)


def machine_of(device: torch.device, slots: int, versions: Values) -> Machine:
    """The machine of a process that trains on a device, with `versions` of packages.

    CPUs with different numbers of processors or threads count as different devices.
    """
    import torch  # noqa: PLC0415  # it takes seconds

    from determined_amp.amp.precision import DeviceSupport  # noqa: PLC0415

    support, on_gpu = DeviceSupport.of(device), device.type == "cuda"
    cpu = f"cpu ({os.cpu_count()} processors, torch threads: {torch.get_num_threads()})"
    name = support.name if on_gpu else cpu
    return Machine(name, slots, on_gpu, support.tf32, torch.__version__, versions)


def installed_version(package: str) -> str | None:
    """The version of an optional package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the working directory, with `-dirty` if files have changed; None
    outside a checkout.
    """
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            describe, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None
