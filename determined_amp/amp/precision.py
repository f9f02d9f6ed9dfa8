"""What a device computes natively, and the switches that each precision needs."""

from __future__ import annotations

import logging
import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from determined_amp.amp.errors import UserError
from determined_amp.amp.settings import Precision

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSupport:
    """What a GPU computes natively, that is, without a detour through float32.

    CPUs are always reported as not native, even if they have the instructions. Only a
    measurement tells whether the kernels use them, and how fast they are.

    Args:
        name: The device, in words.
        tf32: Whether it has TF32 tensor cores (Ampere and later).
        fp16: Whether it computes in float16.
        bf16: Whether it computes in bfloat16 without emulation.
            `torch.cuda.is_bf16_supported()` also says yes for GPUs that emulate it
            (Turing and older).
    """

    name: str
    tf32: bool
    fp16: bool
    bf16: bool

    @staticmethod
    def of(device: torch.device) -> DeviceSupport:
        """Ask the device itself. No synchronisation."""
        if device.type != "cuda":
            return DeviceSupport("cpu", tf32=False, fp16=False, bf16=False)
        is_amd = torch.version.hip is not None
        ampere = not is_amd and torch.cuda.get_device_capability(device)[0] >= 8
        name = torch.cuda.get_device_name(device)
        return DeviceSupport(name, tf32=ampere, fp16=True, bf16=ampere or is_amd)

    def lacks(self, precision: Precision) -> bool:
        """Whether the device would only emulate the products of `precision`."""
        native = {
            Precision.FP32: True,
            Precision.TF32: self.tf32,
            Precision.AMP_FP16: self.fp16,
            Precision.AMP_BF16: self.bf16,
        }
        return not native[precision]


def described(device: torch.device, slots: int) -> str:
    """Describe what a run trains on in one line for its log.

    Args:
        device: The device of this process.
        slots: How many such devices train together.
    """
    support = DeviceSupport.of(device)
    answers = [f"{p.value} {'no' if support.lacks(p) else 'yes'}" for p in Precision]
    natively = f", natively: {', '.join(answers)}" if device.type == "cuda" else ""
    return (
        f"{slots} x {support.name}{natively}; "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


class PrecisionError(UserError):
    """The device would emulate the precision that was asked for."""


def prepare_backend(
    precision: Precision, device: torch.device, *, set_switches: bool
) -> None:
    """Set torch's process-wide TF32 switches for `precision`, before the first kernel.

    TF32 is on only for `tf32`. The operations that the AMP precisions keep in float32
    are sensitive, so they stay IEEE float32.

    A precision that a GPU only emulates is an error. A CPU may emulate it, because
    people try out a YAML there before they use a GPU; see `warn_of_slow_operations`.

    Args:
        precision: The precision of training.
        device: The device that trains.
        set_switches: False leaves the switches as they are.

    Raises:
        PrecisionError: if `device` is a GPU that only emulates bfloat16.
    """
    support = DeviceSupport.of(device)
    if support.lacks(precision):
        if precision is Precision.TF32:
            logger.warning(
                "amp.precision is tf32, but %s has no TF32: "
                "products are computed in IEEE float32, as with fp32",
                support.name,
            )
        elif device.type == "cuda":
            raise PrecisionError(
                f"amp.precision: got {precision.value}, which {support.name} only "
                "emulates (slower than fp32); allowed on it: fp32, amp_fp16"
            )
    if set_switches:
        _set_tf32(on=precision is Precision.TF32 and support.tf32)


def _set_tf32(*, on: bool) -> None:
    """Set torch's old TF32 switches and, if torch has them, the new ones by operation.

    The old ones alone leave convolutions at TF32 if `torch.backends.fp32_precision` was
    set before.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    cudnn: Any = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        for operation in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            operation.fp32_precision = "tf32" if on else "ieee"


def warn_of_slow_operations(precision: Precision, device: torch.device) -> None:
    """Warn that a CPU may be far slower in 16 bits, and name the command to measure it.

    It may also be faster. A CPU's instructions for a dtype do not tell, because not
    every kernel uses them.
    """
    if precision.autocast_dtype is not None and device.type == "cpu":
        logger.warning(
            "amp.precision is %s on a CPU, which may compute many times slower in 16 "
            "bits than in float32: `det-amp compare` measures it",
            precision.value,
        )


def autocast(
    device_type: str, dtype: torch.dtype | None
) -> AbstractContextManager[Any]:
    """An autocast region with a dtype; disabled if the dtype is None."""
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def autocast_is_on(device_type: str) -> bool:
    """Whether autocast is currently enabled for a type of device."""
    try:
        return torch.is_autocast_enabled(device_type)
    except TypeError:  # torch 2.3 has one function per device type
        return (
            torch.is_autocast_enabled()
            if device_type == "cuda"
            else torch.is_autocast_cpu_enabled()
        )
