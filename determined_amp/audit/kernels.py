"""Tells from the names of GPU kernels which of them compute on tensor cores."""

from __future__ import annotations

import re
from collections.abc import Iterable

# A kernel's name tells which instructions it uses. The mma shapes (884: Volta, 1688: Turing, 16816:
# Ampere) and hmma are from the list in NVIDIA's PyProf, pyprof/prof/tc.py. Newer names are xmma and
# tensorop (cuDNN, CUTLASS), gmma and nvjet (Hopper), flash and fmha (attention).
_TENSOR_CORES = re.compile(
    r"[hsic](884|8816|1688|16816)|hmma|xmma|gmma|tensorop|nvjet"
    r"|first_layer_wgrad_kernel|dgrad_1x1_stride_2x2"
    r"|flash_(fwd|bwd|fprop|bprop)|fmha_cutlass[fb]_b?f16",
    re.IGNORECASE,
)
_CUDA_CORES = re.compile(r"ffma|simt", re.IGNORECASE)  # xmma and CUTLASS without tensor cores


# Copies, which the profiler lists among the kernels.
_COPIES = ("Memcpy", "Memset")


def tensor_core_share(kernels: Iterable[tuple[str, float]]) -> float | None:
    """Share of time in kernels that compute on tensor cores, judged by name.

    Args:
        kernels: Name and duration, in any unit, of everything the GPU ran; copies are left out.

    Returns:
        The share; None if the profiler delivered no kernels.
    """
    total, on_tensor_cores = 0.0, 0.0
    for name, duration in kernels:
        if name.startswith(_COPIES):
            continue
        total += duration
        if _TENSOR_CORES.search(name) and not _CUDA_CORES.search(name):
            on_tensor_cores += duration
    return on_tensor_cores / total if total else None
