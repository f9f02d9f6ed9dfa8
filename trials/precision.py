"""The four precisions, and what a device can really do with them."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)


class Precision(enum.Enum):
    """What matrix products and convolutions are computed in.

    `fp32` is IEEE float32: TF32 is off, which makes it the honest baseline. `tf32` rounds the
    inputs of float32 products to 10 mantissa bits on tensor cores. `amp_fp16` and `amp_bf16`
    autocast to that dtype; weights and optimizer state stay float32 in all four.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    AMP_FP16 = "amp_fp16"
    AMP_BF16 = "amp_bf16"

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype autocast computes in, or None where autocast is off."""
        return {
            Precision.AMP_FP16: torch.float16,
            Precision.AMP_BF16: torch.bfloat16,
        }.get(self)


@dataclass(frozen=True)
class DeviceSupport:
    """What one device computes natively.

    Args:
        name: The device, in words.
        tf32: TF32 tensor cores (Ampere and later).
        fp16: float16 that is not slower than float32 by construction; False on a CPU, where it
            works but without fast kernels.
        bf16: bfloat16 without emulation. `torch.cuda.is_bf16_supported()` also says yes where it
            is emulated (Turing and older), which is slower than float32.
    """

    name: str
    tf32: bool
    fp16: bool
    bf16: bool

    @staticmethod
    def of(device: torch.device) -> DeviceSupport:
        """Ask the device itself; synchronises with nothing."""
        if device.type != "cuda":
            return DeviceSupport(device.type, tf32=False, fp16=False, bf16=True)
        major, _ = torch.cuda.get_device_capability(device)
        ampere = torch.version.hip is None and major >= 8
        bf16 = ampere or torch.version.hip is not None
        name = torch.cuda.get_device_name(device)
        return DeviceSupport(name, tf32=ampere, fp16=True, bf16=bf16)


class PrecisionError(ValueError):
    """The device would emulate the precision that was asked for."""


def prepare_backend(precision: Precision, device: torch.device, cudnn_benchmark: bool) -> None:
    """Set the process-wide switches that `precision` needs, before the first kernel.

    TF32 is on for `tf32` alone. In the AMP precisions what stays float32 does so because it is
    sensitive, so it stays IEEE.

    Raises:
        PrecisionError: if `device` only emulates bfloat16.
    """
    support = DeviceSupport.of(device)
    if precision is Precision.AMP_BF16 and not support.bf16:
        raise PrecisionError(
            f"amp.precision: got amp_bf16, which {support.name} only emulates (slower than fp32); "
            "allowed on it: fp32, amp_fp16"
        )
    if precision is Precision.TF32 and not support.tf32:
        logger.warning(
            "amp.precision is tf32, but %s has no TF32: "
            "products are computed in IEEE float32, as with fp32",
            support.name,
        )
    if precision is Precision.AMP_FP16 and not support.fp16:
        logger.warning(
            "amp.precision is amp_fp16 on %s: correct, but convolutions and large products are "
            "many times slower than fp32 there; amp_bf16 is the fast one on a CPU",
            support.name,
        )
    tf32 = precision is Precision.TF32 and support.tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = cudnn_benchmark
