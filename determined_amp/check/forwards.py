"""Watches forwards: autocast, the weights that it has cast, validations."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from determined_amp.amp.precision import autocast_is_on
from determined_amp.amp.rehearse.backward_graph import WHOLE_MODEL, module_names
from determined_amp.amp.tensors import has_numbers, is_finite
from determined_amp.amp.torch_private import version_of
from determined_amp.check.causes import has_overflown, overflow_in
from determined_amp.check.record import Record
from determined_amp.check.stand_in import unheard

# So many forwards without gradients are looked at: each takes several times as long.
_MOST_LOOKS = 3


class Forwards:
    """What is known of the forwards of all modules.

    Args:
        record: What they do is noted there.

    Attributes:
        roots: The modules that the training itself has called.
    """

    def __init__(self, record: Record) -> None:
        self.roots: dict[nn.Module, None] = {}
        # The modules that have run, each with its buffers that were finite then.
        self._met: dict[nn.Module, list[str]] = {}
        self._record = record
        self._running: list[nn.Module] = []
        self._first: nn.Module | None = None  # that was called with gradients
        self._looks = _MOST_LOOKS  # that validations may still get
        # Versions of weights at their first use since autocast has dropped its casts.
        self._cast: dict[int, int] = {}

    def enter_autocast(self) -> None:
        """The module of this forward may enter it itself."""
        if self._running and torch.is_grad_enabled():
            self._record.forwards[True] += 1

    def begins_again(self, module: nn.Module) -> bool:
        """Whether the training calls the module with which its batches begin."""
        if self._running:
            return False
        first, self._first = self._first, self._first or module
        return first is module

    @unheard
    def before(self, module: nn.Module, inputs: Any) -> None:
        """A hook of all modules."""
        if not self._running:
            self.roots[module] = None
        self._running.append(module)
        if module not in self._met:
            buffers = module.named_buffers(recurse=False)
            self._met[module] = [
                name for name, each in buffers if has_numbers(each) and is_finite(each)
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
            for weight in matrices:
                version = version_of(weight)
                if self._cast.setdefault(id(weight), version) != version:
                    self._record.note("stale")
                    break

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A hook of all modules."""
        is_validation = len(self._running) == 1 and not torch.is_grad_enabled()
        is_wanted = is_validation and self._looks and not self._record.validation
        if is_wanted and has_overflown(output) and not has_overflown(inputs):
            self._looks -= 1
            self._record.validation = overflow_in(module, inputs)
        self._running = self._running[:-1]

    def drop_casts(self) -> None:
        """Autocast has dropped its casts."""
        self._cast.clear()

    def buffers_not_finite(self) -> Iterator[str]:
        """Those that were finite when they were met."""
        for module, names in self._met.items():
            for name, buffer in module.named_buffers(recurse=False):
                if name in names and not is_finite(buffer):
                    yield f"{name} of {self._name_of(module)}"

    def holders_of(self, weights: Collection[torch.Tensor]) -> Iterator[str]:
        """The modules that have run with these weights, one for each weight."""
        for module in self._met:
            for weight in module.parameters(recurse=False):
                if weight in weights:
                    yield self._name_of(module)

    def _name_of(self, module: nn.Module) -> str:
        """Its name in the model whose forward runs, or that of its class."""
        name, kind = module_names([*self.roots]).get(module), type(module).__name__
        return kind if name in (None, WHOLE_MODEL) else f"{name} ({kind})"
