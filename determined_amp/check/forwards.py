"""Watches the forwards of all modules: autocast, stale casts of weights, validations.

The recorder calls it from torch's module hooks. If a validation overflows, it asks
`causes.py` for the cause.
"""

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

# How many overflows in forwards without gradients are examined. Each one computes the
# forward again, which takes several times as long.
_MOST_LOOKS = 3


class Forwards:
    """What is known of the forwards of all modules.

    Args:
        record: Where the events and the causes are noted.

    Attributes:
        roots: The modules that the training itself has called.
    """

    def __init__(self, record: Record) -> None:
        self.roots: dict[nn.Module, None] = {}
        # Each module that has run, with the buffers that were finite at its first run.
        self._met: dict[nn.Module, list[str]] = {}
        self._record = record
        self._running: list[nn.Module] = []
        self._first: nn.Module | None = None  # of the first forward with gradients
        self._looks_left = _MOST_LOOKS  # examinations that are left
        # The version of each weight, by id, at its first use since autocast dropped its
        # casts.
        self._versions_when_cast: dict[int, int] = {}

    def enter_autocast(self) -> None:
        """Count a forward that enters autocast itself as one under autocast."""
        if self._running and torch.is_grad_enabled():
            self._record.forwards[True] += 1

    def begins_again(self, module: nn.Module) -> bool:
        """Whether the training itself calls the module that it called first."""
        if self._running:
            return False
        first, self._first = self._first, self._first or module
        return first is module

    @unheard
    def before(self, module: nn.Module, inputs: Any) -> None:
        """A hook before the forward of each module."""
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
                if self._versions_when_cast.setdefault(id(weight), version) != version:
                    self._record.note("stale")
                    break

    def after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A hook after the forward of each module."""
        is_validation = len(self._running) == 1 and not torch.is_grad_enabled()
        is_wanted = (
            is_validation and self._looks_left and not self._record.validation_cause
        )
        if is_wanted and has_overflown(output) and not has_overflown(inputs):
            self._looks_left -= 1
            self._record.validation_cause = overflow_in(module, inputs)
        self._running = self._running[:-1]

    def drop_casts(self) -> None:
        """Forget the weights that autocast has cast, as it has dropped the casts."""
        self._versions_when_cast.clear()

    def buffers_not_finite(self) -> Iterator[str]:
        """Yield the buffers that are not finite now but were at the first run."""
        for module, names in self._met.items():
            for name, buffer in module.named_buffers(recurse=False):
                if name in names and not is_finite(buffer):
                    yield f"{name} of {self._name_of(module)}"

    def holders_of(self, weights: Collection[torch.Tensor]) -> Iterator[str]:
        """Yield the module of each of these weights, if it has run."""
        for module in self._met:
            for weight in module.parameters(recurse=False):
                if weight in weights:
                    yield self._name_of(module)

    def _name_of(self, module: nn.Module) -> str:
        """The name of a module and its class; only the class for a whole model."""
        name, kind = module_names([*self.roots]).get(module), type(module).__name__
        return kind if name in (None, WHOLE_MODEL) else f"{name} ({kind})"
