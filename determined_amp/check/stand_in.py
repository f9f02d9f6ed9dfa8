"""Runs mixed precision that is written for CUDA on a machine that has only a CPU."""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.amp import autocast_mode
from torch.overrides import TorchFunctionMode

from determined_amp.amp.fp32_modules import as_float32
from determined_amp.amp.patched import patched
from determined_amp.amp.precision import autocast_is_on
from determined_amp.check.lines import is_users

# What only a GPU can show.
ONLY_ON_A_GPU = (
    "this machine has no GPU, so the CPU stood in for it: it cannot tell what a synchronisation "
    "costs, which fused optimizers are used, TF32 products, or gradients that differ by CUDA kernel"
)


@contextmanager
def cpu_for_cuda(*, pretends: bool = True) -> Iterator[None]:
    """Let CUDA mean the CPU in this block; where there is a GPU nothing happens.

    Args:
        pretends: Whether `torch.cuda.is_available()` says yes to every line of the user's, so that
            all that is switched on by it is examined; else to lines about mixed precision alone.
    """
    rules = _RulesOfCuda()
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for owner, name, make in _replaced(_ANY if pretends else _SWITCHES):
                stack.enter_context(patched(owner, name, make(getattr(owner, name))))
            stack.enter_context(warnings.catch_warnings())
            for words in ("CUDA is not available", ".*torch.cuda.amp", "User provided device_type"):
                warnings.filterwarnings("ignore", words)
            stack.enter_context(rules)
        make = _noting(torch.autocast.__init__, rules)
        stack.enter_context(patched(torch.autocast, "__init__", make))
        yield


class _RulesOfCuda(TorchFunctionMode):
    """Computes in float32 what autocast does on CUDA, and leaves in 16 bits on the CPU.

    Attributes:
        apply: Whether an autocast of CUDA was made, and none of the CPU.
    """

    apply: bool | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            self.apply
            and getattr(func, "__name__", "") in _FLOAT32_ON_CUDA
            and autocast_is_on("cpu")
        ):
            args, kwargs = as_float32((args, kwargs))
        return func(*args, **kwargs)


def _noting(own: Callable[..., Any], rules: _RulesOfCuda) -> Callable[..., Any]:
    """Remember of each autocast whether its dtype was chosen by the user."""

    @wraps(own)
    def make(region: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        region._given_dtype = dtype is not None
        if _is_cuda(device_type):
            rules.apply = rules.apply is not False
        elif is_users(sys._getframe(1).f_code.co_filename):  # not torch's own for a checkpoint
            rules.apply = False
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


def _here(own: Callable[..., Any]) -> Callable[..., Any]:
    """The same on the CPU, wherever an argument names CUDA."""

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*map(_on_cpu, args), **{key: _on_cpu(value) for key, value in kwargs.items()})

    return call


def _by_default(own: Callable[..., Any]) -> Callable[..., Any]:
    """The same on the CPU, where CUDA is the device if no argument names one."""

    @wraps(own)
    def call(scaler: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> Any:
        return own(scaler, _on_cpu(device), *args, **kwargs)

    return call


def _question(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda device_type="cuda": own(_on_cpu(device_type))


def _stays(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda it, *args, **kwargs: it


def _instead(answer: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda own: lambda *args, **kwargs: answer


def _to_lines(pattern: re.Pattern[str], answer: Any) -> Callable[..., Callable[..., Any]]:
    """Answer so to the lines of the user's code that have the pattern."""

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def ask() -> Any:
            caller = sys._getframe(1)
            line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
            users = is_users(caller.f_code.co_filename) and pattern.search(line)
            return answer if users else own()

        return ask

    return make


class _Absent:
    """A stream or an event of a GPU that is not there: everything can be done with it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a stream takes."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Absent:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave nothing."""

    def elapsed_time(self, end: object) -> float:
        return 0.0


# A line that switches mixed precision on where there is a GPU; any line but one that needs a GPU.
_SWITCHES = re.compile(r"GradScaler|autocast|amp|fp16|half", re.IGNORECASE)
_ANY = re.compile(r"^(?!.*(fused|nccl|triton|flash))", re.IGNORECASE)

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

_TAKE_A_DEVICE = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "normal", "ones", "rand"),
    *("randint", "randn", "randperm", "tensor", "zeros", "empty_like", "full_like", "ones_like"),
    *("rand_like", "randint_like", "randn_like", "zeros_like", "load", "set_default_device"),
)


def _replaced(lines: re.Pattern[str]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """What is replaced, and what makes the replacement from it."""
    yield torch.amp.GradScaler, "__init__", _by_default
    yield torch.autocast, "__init__", _autocast
    if hasattr(torch, "get_autocast_dtype"):
        yield torch, "is_autocast_enabled", _question
        yield torch, "get_autocast_dtype", _question
        yield autocast_mode, "_cast", _here
    else:  # torch 2.3 has one question for each device
        yield torch, "is_autocast_enabled", lambda own: torch.is_autocast_cpu_enabled
        yield torch, "get_autocast_gpu_dtype", lambda own: torch.get_autocast_cpu_dtype
    for kind in (torch.Tensor, nn.Module):
        yield kind, "cuda", _stays
        yield kind, "to", _here
    yield torch.Tensor, "pin_memory", _stays
    yield torch.Tensor, "record_stream", _instead(None)
    for name in _TAKE_A_DEVICE:
        yield torch, name, _here
    yield torch.cuda, "is_available", _to_lines(lines, True)
    yield torch.cuda, "device_count", _to_lines(lines, 1)
    for name in ("synchronize", "set_device", "reset_peak_memory_stats"):
        yield torch.cuda, name, _instead(None)
    for name in ("Stream", "Event", "stream", "current_stream", "get_device_properties"):
        yield torch.cuda, name, lambda own: _Absent
    yield torch.cuda, "current_device", _instead(0)
    yield torch.cuda, "get_device_name", _instead("no GPU")
    yield torch.cuda, "get_device_capability", _instead((8, 0))
    yield torch.cuda, "is_bf16_supported", _instead(True)
