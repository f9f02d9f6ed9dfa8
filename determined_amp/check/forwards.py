"""Watches the forwards of a training: autocast, the weights that it has cast, and
overflows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.tensors import is_finite, tensors_of
from determined_amp.amp.torch_private import version_of
from determined_amp.check.record import Record


class Forwards:
    """What is known of the forwards of all modules.

    Args:
        record: What they do is noted there.

    Attributes:
        looks: Whether to look for the first output that is not finite, which takes
            time.
        met: The modules that have run, each with its buffers that were finite when it
            was met.
    """

    def __init__(self, record: Record) -> None:
        self.looks = False
        self.met: dict[nn.Module, list[str]] = {}
        self._record = record
        self._running: list[nn.Module] = []
        # Versions of weights at their first use since autocast has dropped its casts.
        self._cast: dict[int, int] = {}

    def enter_autocast(self) -> None:
        """The module of this forward may enter it itself."""
        if self._running and torch.is_grad_enabled():
            self._record.forwards[True] += 1

    def before(self, module: nn.Module, inputs: Any) -> None:
        """A hook of all modules."""
        self._running.append(module)
        if module not in self.met:
            self.met[module] = [
                name for name, each in _buffers(module) if is_finite(each)
            ]
        weights = [
            p for p in module.parameters(recurse=False) if p.requires_grad and p.is_leaf
        ]
        if not weights:
            return
        on = autocast_is_on(weights[0].device.type)
        if torch.is_grad_enabled():
            self._record.forwards[on] += 1
        if on and torch.is_autocast_cache_enabled():
            matrices = [p for p in weights if p.dtype is torch.float32 and p.dim() > 1]
            old = [
                p
                for p in matrices
                if self._cast.setdefault(id(p), version_of(p)) != version_of(p)
            ]
            if old:
                self._record.note("stale")

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A hook of all modules."""
        if self._running:
            self._running.pop()
        looks = (
            self.looks and not self._record.first_overflow and torch.is_grad_enabled()
        )
        if looks and _has_overflown(output) and not _has_overflown(inputs):
            self._record.first_overflow = self._name_of(module) + _remedy(
                module, inputs
            )

    def drop_casts(self) -> None:
        """Autocast has dropped its casts."""
        self._cast.clear()

    def buffers_not_finite(self) -> Iterator[str]:
        """Those that were finite when they were met."""
        for module, names in self.met.items():
            buffers = dict(_buffers(module))
            for name in names:
                if name in buffers and not is_finite(buffers[name]):
                    yield f"{name} of {self._name_of(module)}"

    def _name_of(self, module: nn.Module) -> str:
        """Its name in the model whose forward runs, or that of its class."""
        for root in [*self._running[:1], *self.met]:
            for name, each in root.named_modules():
                if each is module and name:
                    return f"{name} ({type(module).__name__})"
        return type(module).__name__


def _has_overflown(value: Any) -> bool:
    """Whether it has NaN or infinity; minus infinity is a mask."""
    tensors = [each for each in tensors_of(value) if each.is_floating_point()]
    return any(bool((each.isnan() | each.isposinf()).any()) for each in tensors)


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            yield name, buffer


def _remedy(module: nn.Module, inputs: Any) -> str:
    """What was tried on a module without others inside and without buffers."""
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return ""
    helps = []
    for dtype in (torch.float32, torch.bfloat16):
        # It may not take another dtype. The casts that autocast keeps are those of
        # float16.
        with (
            suppress(Exception),
            torch.no_grad(),
            torch.autocast(inputs[0].device.type, enabled=False),
        ):
            given = [each.to(dtype) for each in inputs]
            if is_finite(copy.deepcopy(module).to(dtype).forward(*given)):
                helps.append(f"in {str(dtype).removeprefix('torch.')}")
    return f"; tried: finite {' and '.join(helps)}" if helps else ""
