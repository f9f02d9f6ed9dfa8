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

from determined_amp.amp.patched import patched
from determined_amp.check.record import is_users

# What only a GPU can show.
ONLY_ON_A_GPU = (
    "this machine has no GPU, so the CPU stood in for it: it cannot tell what a synchronisation "
    "costs, which fused optimizers are used, TF32 products, or gradients that differ by CUDA kernel"
)


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Let `GradScaler("cuda")`, `autocast("cuda")` and `.cuda()` mean the CPU in this block.

    `torch.cuda.is_available()` says yes on a line that switches mixed precision on, and no on any
    other. Where there is a GPU nothing happens.
    """
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for owner, name, make in _REPLACED:
                own = getattr(owner, name)
                stack.enter_context(patched(owner, name, wraps(own)(make(own))))
            stack.enter_context(warnings.catch_warnings())
            for words in ("CUDA is not available", ".*torch.cuda.amp", "User provided device_type"):
                warnings.filterwarnings("ignore", words)
        stack.enter_context(_noting_dtypes())
        yield


@contextmanager
def _noting_dtypes() -> Iterator[None]:
    """Remember of each autocast whether its dtype was chosen by the user."""
    own = torch.autocast.__init__

    @wraps(own)
    def make(region: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        region._given_dtype = dtype is not None
        if dtype is None and _is_cuda(device_type) and not torch.cuda.is_available():
            dtype = torch.float16  # CUDA's own
        own(region, device_type, dtype, *args, **kwargs)

    with patched(torch.autocast, "__init__", make):
        yield


def _is_cuda(device: Any) -> bool:
    text = device.type if isinstance(device, torch.device) else device
    return isinstance(text, str) and text.split(":")[0] == "cuda"


def _on_cpu(device: Any) -> Any:
    return "cpu" if _is_cuda(device) else device


def _scales_here(own: Callable[..., Any]) -> Callable[..., Any]:
    def make(scaler: Any, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        own(scaler, _on_cpu(device), *args, **kwargs)

    return make


def _region(own: Callable[..., Any]) -> Callable[..., Any]:
    def make(region: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        own(region, _on_cpu(device_type), *args, **kwargs)

    return make


def _question(own: Callable[..., Any]) -> Callable[..., Any]:
    def ask(device_type: Any = "cuda") -> Any:
        return own(_on_cpu(device_type))

    return ask


def _instead(of_a_cpu: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def replace(own: Callable[..., Any]) -> Callable[..., Any]:
        def ask() -> Any:
            return of_a_cpu()

        return ask

    return replace


def _casts(own: Callable[..., Any]) -> Callable[..., Any]:
    def cast(value: Any, device_type: Any, dtype: Any) -> Any:
        return own(value, _on_cpu(device_type), dtype)

    return cast


def _available(own: Callable[..., Any]) -> Callable[..., Any]:
    def ask() -> bool:
        caller = sys._getframe(1)
        while caller.f_code.co_filename == __file__ and caller.f_back is not None:
            caller = caller.f_back
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
        switches = is_users(caller.f_code.co_filename) and _SWITCHES.search(line)
        return bool(switches) or bool(own())

    return ask


def _stays(own: Callable[..., Any]) -> Callable[..., Any]:
    def stay(it: Any, *args: Any, **kwargs: Any) -> Any:
        return it

    return stay


def _moves(own: Callable[..., Any]) -> Callable[..., Any]:
    def move(it: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**kwargs, "device": _on_cpu(kwargs["device"])} if "device" in kwargs else kwargs
        return own(it, *map(_on_cpu, args), **given)

    return move


# A line that switches mixed precision on where there is a GPU.
_SWITCHES = re.compile(r"GradScaler|autocast|amp|fp16|half", re.IGNORECASE)

_QUESTIONS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (
        (torch, "is_autocast_enabled", _question),
        (torch, "get_autocast_dtype", _question),
        (autocast_mode, "_cast", _casts),
    )
    if hasattr(torch, "get_autocast_dtype")
    else (  # torch 2.3 has one question for each device
        (torch, "is_autocast_enabled", _instead(torch.is_autocast_cpu_enabled)),
        (torch, "get_autocast_gpu_dtype", _instead(torch.get_autocast_cpu_dtype)),
    )
)

_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (torch.amp.GradScaler, "__init__", _scales_here),
    (torch.autocast, "__init__", _region),
    (torch.cuda, "is_available", _available),
    *_QUESTIONS,
    (torch.Tensor, "cuda", _stays),
    (nn.Module, "cuda", _stays),
    (torch.Tensor, "to", _moves),
    (nn.Module, "to", _moves),
)
