"""Lets `"cuda"` mean the CPU on a machine without a GPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.overrides import TorchFunctionMode

from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.check.lines import is_users

# What only a GPU can show.
ONLY_ON_A_GPU = (
    'this machine has no GPU, so "cuda" meant the CPU: AMP that your code switches on by '
    "torch.cuda.is_available() was off and not examined, nor was what a synchronisation costs, "
    "which fused optimizers are used, TF32 products, or gradients that differ by CUDA kernel"
)


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Let `"cuda"` mean the CPU in this block; where there is a GPU nothing changes."""
    here = _OnCpu()
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for owner, name, make in _replaced():
                stack.enter_context(patched(owner, name, make(getattr(owner, name))))
            stack.enter_context(warnings.catch_warnings())
            for words in ("CUDA is not available", ".*torch.cuda.amp", "User provided device_type"):
                warnings.filterwarnings("ignore", words)
            stack.enter_context(here)
        make = _noting(torch.autocast.__init__, here)
        stack.enter_context(patched(torch.autocast, "__init__", make))
        yield


class _OnCpu(TorchFunctionMode):
    """Runs every function of torch on the CPU where an argument names CUDA.

    Computes in float32 what autocast does on CUDA, and leaves in 16 bits on the CPU.

    Attributes:
        apply: Whether an autocast of CUDA was made, and none of the CPU.
    """

    apply: bool | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        args = [_on_cpu(each) for each in args]
        kwargs = {key: _on_cpu(value) for key, value in (kwargs or {}).items()}
        if self.apply and name in _FLOAT32_ON_CUDA and autocast_is_on("cpu"):
            args, kwargs = as_float32((args, kwargs))
        return func(*args, **kwargs)


def _noting(own: Callable[..., Any], here: _OnCpu) -> Callable[..., Any]:
    """Remember of each autocast whether its dtype was chosen by the user."""

    @wraps(own)
    def make(region: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        region._given_dtype = dtype is not None
        if _is_cuda(device_type):
            here.apply = here.apply is not False
        elif is_users(sys._getframe(1).f_code.co_filename):  # not torch's own for a checkpoint
            here.apply = False
        own(region, device_type, dtype, *args, **kwargs)

    return make


def _autocast(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def make(region: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if dtype is None and _is_cuda(device_type):
            dtype = torch.float16  # CUDA's own
        own(region, _on_cpu(device_type), dtype, *args, **kwargs)

    return make


def _is_cuda(device: Any) -> bool:
    text = device.type if isinstance(device, torch.device) else device
    return isinstance(text, str) and text.split(":")[0] == "cuda"


def _on_cpu(device: Any) -> Any:
    return "cpu" if _is_cuda(device) else device


def _cast(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value, device_type, dtype: own(value, _on_cpu(device_type), dtype)


def _scaler_of(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def make(scaler: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
        return own(scaler, _on_cpu(device), *args, **kwargs)

    return make


def _question(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device_type="cuda": own(_on_cpu(device_type))


# docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32"
_FLOAT32_ON_CUDA = frozenset(
    (
        *("__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "cdist", "cosh"),
        *("binary_cross_entropy_with_logits", "cosine_embedding_loss", "cosine_similarity"),
        *("cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm"),
        *("hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p"),
        *("log2", "log_softmax", "margin_ranking_loss", "mse_loss", "multi_margin_loss"),
        *("multilabel_margin_loss", "nll_loss", "norm", "pdist", "poisson_nll_loss", "pow"),
        *("prod", "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss"),
        *("softmax", "softmin", "softplus", "sum", "tan", "triplet_margin_loss"),
    )
)


def _replaced() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What is replaced, and what makes the replacement from it."""
    yield torch.amp.GradScaler, "__init__", _scaler_of
    yield torch.autocast, "__init__", _autocast
    if hasattr(torch, "get_autocast_dtype"):
        yield torch, "is_autocast_enabled", _question
        yield torch, "get_autocast_dtype", _question
        yield autocast_mode, "_cast", _cast
    else:  # torch 2.3 has one question for each device
        yield torch, "is_autocast_enabled", lambda own: torch.is_autocast_cpu_enabled
        yield torch, "get_autocast_gpu_dtype", lambda own: torch.get_autocast_cpu_dtype
