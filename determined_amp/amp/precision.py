"""What a device computes natively, and the switches that each precision needs."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from determined_amp.experiment.amp_settings import Precision
from determined_amp.experiment.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeviceSupport:
    """What one device computes natively, that is, without going through float32.

    Args:
        name: The device, in words.
        tf32: TF32 tensor cores (Ampere and later).
        fp16: float16.
        bf16: bfloat16 without emulation. `torch.cuda.is_bf16_supported()` also says yes where it
            is emulated (Turing and older).
    """

    name: str
    tf32: bool
    fp16: bool
    bf16: bool

    @staticmethod
    def of(device: torch.device) -> DeviceSupport:
        """Ask the device itself. No synchronisation."""
        if device.type != "cuda":
            return DeviceSupport("cpu", tf32=False, fp16=_cpu_has("fp16"), bf16=_cpu_has("bf16"))
        ampere = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8
        bf16 = ampere or torch.version.hip is not None
        name = torch.cuda.get_device_name(device)
        return DeviceSupport(name, tf32=ampere, fp16=True, bf16=bf16)

    def lacks(self, precision: Precision) -> bool:
        """Whether the device would only emulate the products of `precision`."""
        native = {
            Precision.FP32: True,
            Precision.TF32: self.tf32,
            Precision.AMP_FP16: self.fp16,
            Precision.AMP_BF16: self.bf16,
        }
        return not native[precision]


def described_device(device: torch.device) -> dict[str, Any]:
    """What a run trains on, as plain values, which reports compare.

    CPUs with different numbers of processors or threads count as different devices.
    """
    support, on_gpu = DeviceSupport.of(device), device.type == "cuda"
    cpu = f"cpu ({os.cpu_count()} processors, torch threads: {torch.get_num_threads()})"
    return {
        "device": support.name if on_gpu else cpu,
        "on_gpu": on_gpu,
        "has_tf32": support.tf32,
        "torch": torch.__version__,
    }


def described(device: torch.device, slots: int) -> str:
    """What a run trains on, in one line for its log.

    Args:
        device: The device of this process.
        slots: How many such devices train together.
    """
    support = DeviceSupport.of(device)
    answers = (f"{p.value} {'no' if support.lacks(p) else 'yes'}" for p in Precision)
    return (
        f"{slots} x {support.name}, natively: {', '.join(answers)}; "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _cpu_has(dtype: str) -> bool:
    """Whether oneDNN, which computes products and convolutions on a CPU, has kernels for it."""
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported", None)
    return supported is not None and bool(supported())


class PrecisionError(UserError):
    """The device would emulate the precision that was asked for."""


def prepare_backend(precision: Precision, device: torch.device, *, set_switches: bool) -> None:
    """Set the process-wide switches for TF32 that `precision` needs, before the first kernel.

    TF32 is on only for `tf32`. What the AMP precisions keep in float32 is sensitive, so it stays
    IEEE float32.

    A precision that a GPU only emulates is an error: nobody wants it there. On a CPU people try
    out a YAML before it goes to a GPU; see `warn_of_slow_operations`.

    Args:
        precision: What training computes in.
        device: Where.
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
                f"amp.precision: got {precision.value}, which {support.name} only emulates "
                "(slower than fp32); allowed on it: fp32, amp_fp16"
            )
    if set_switches:
        _set_tf32(on=precision is Precision.TF32 and support.tf32)


def _set_tf32(*, on: bool) -> None:
    """Set torch's old switches and, where this torch has them, the new ones of every operation.

    The old ones alone leave convolutions at TF32 if `torch.backends.fp32_precision` was set before.
    """
    torch.set_float32_matmul_precision("high" if on else "highest")
    torch.backends.cudnn.allow_tf32 = on
    cudnn: Any = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        for operation in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn):
            operation.fp32_precision = "tf32" if on else "ieee"


# More than a measurement of two small operations can be wrong by.
_SLOW = 2.0


@dataclass(frozen=True)
class _Kind:
    """A kind of operation that autocast computes in 16 bits.

    Args:
        name: In the plural.
        layers: The modules that compute it.
        run: Computes one of a few million multiplications.
        shapes: Of its two factors.
    """

    name: str
    layers: tuple[type[nn.Module], ...]
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]


_KINDS = (
    _Kind(
        "matrix products",
        (nn.Linear, nn.MultiheadAttention),
        functional.linear,
        ((256, 256), (256, 256)),
    ),
    _Kind(
        "convolutions",
        (nn.modules.conv._ConvNd,),
        functional.conv2d,
        ((4, 32, 8, 8), (32, 32, 3, 3)),
    ),
)


def warn_of_slow_operations(
    precision: Precision, device: torch.device, models: Sequence[nn.Module]
) -> None:
    """Warn of each kind of operation in `models` that this CPU computes far slower in 16 bits.

    It is measured, once in a process and in a fraction of a second: a CPU that has instructions
    for a dtype may have no kernel that uses them. On a GPU nothing is measured.
    """
    dtype = precision.autocast_dtype
    if dtype is None or device.type != "cpu":
        return
    modules = [module for model in models for module in model.modules()]
    for kind in _KINDS:
        if not any(isinstance(module, kind.layers) for module in modules):
            continue
        longer = _times_as_long(kind, dtype)
        if longer > _SLOW:
            bf16 = precision is Precision.AMP_FP16 and (
                _times_as_long(kind, torch.bfloat16) <= _SLOW
            )
            logger.warning(
                "amp.precision is %s, and on this CPU %s take %.0f times as long in %s as in "
                "float32, forward and backward: train in %s here, in %s on a GPU",
                precision.value,
                kind.name,
                longer,
                str(dtype).removeprefix("torch."),
                "fp32 or amp_bf16" if bf16 else "fp32",
                precision.value,
            )


@cache
@torch.enable_grad()
def _times_as_long(kind: _Kind, dtype: torch.dtype) -> float:
    """How many times as long as in float32 one operation and its backward take in `dtype`."""

    def seconds(dtype: torch.dtype) -> float:
        left, right = (torch.ones(shape, dtype=dtype, requires_grad=True) for shape in kind.shapes)
        start = time.perf_counter()
        kind.run(left, right).sum().backward()  # type: ignore[no-untyped-call]  # torch
        return time.perf_counter() - start

    # In one thread: several wait for each other on a busy machine, a hundred times as long.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:  # by turns, because other processes disturb; the first of each allocates
        turns = [(seconds(torch.float32), seconds(dtype)) for _ in range(4)]
    finally:
        torch.set_num_threads(threads)
    full = min(first for first, _ in turns)
    return min(second for _, second in turns) / full
