"""Follows the gradients of an optimizer: what multiplies them, and what happens to them."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch.optim import Optimizer

from determined_amp.amp.tensors import largest_of, parameters_of, values_of
from determined_amp.check.graph import Loss
from determined_amp.check.record import Event, Record, Window

Versions = list[tuple[int, int]]

# So often a window is made to overflow: what the first backward leaves may be zeroed before the
# step, as the gradients that a generator's loss leaves in the discriminator are.
_MOST_OVERFLOWS = 2


def norm_of(tensors: list[torch.Tensor]) -> float:
    """The norm of all of their numbers together, taken in float32."""
    norms = [torch.linalg.vector_norm(each.detach().float()).cpu() for each in tensors]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


class Gradients:
    """The gradients of one optimizer.

    Args:
        optimizer: The optimizer.
        record: What happens to them is noted there.
        overflows: Windows of them that are made to overflow.
    """

    def __init__(self, optimizer: Optimizer, record: Record, overflows: Collection[int]) -> None:
        self.number = record.optimizers  # the place of the optimizer among all
        self.factor = 1.0  # what they are multiplied by; NaN if that is not known
        self.scaler: int | None = None  # the number of the scaler that multiplied them
        self.pending = False  # there are some that no step has used
        self.norm = math.nan  # when they were looked at last
        self.updates = 0  # of the scale since the newest backward
        self.windows = 0  # that have begun
        self.window = Window(self.number)  # the newest
        self.stale = 0  # of them, those that a step has used and nobody has zeroed since
        self._optimizer = optimizer
        self._record = record
        self._overflows = overflows
        self._before: list[torch.Tensor] = []  # the newest backward, if there were any to add to
        self._peak = math.nan  # largest size of an element, when they were looked at last
        self._emptied = False  # after the newest backward
        self._forced = 0  # how often the doctor made this window overflow
        self._overflown = 0  # windows that it made overflow
        self._used: Versions | None = None  # by the newest step
        self._unscaled: float | None = None  # the norm that the scaler left, before any clip
        self._looked = False  # a scaler has looked for the overflow in this window
        self._forces = False  # this window is one to make overflow
        self.scale: float | None = None  # that the newest backward was scaled by
        record.optimizers += 1

    @property
    def weights(self) -> list[torch.Tensor]:
        """What they are the gradients of."""
        return parameters_of(self._optimizer)

    def dense(self) -> list[torch.Tensor]:
        """Those there are."""
        gradients = (p.grad for p in self.weights if p.grad is not None)
        return [g._values() if g.is_sparse else g for g in gradients]

    def versions(self) -> Versions:
        """What differs as soon as one of them is another or has other values."""
        gradients = (p.grad for p in self.weights)
        return [(0, 0) if g is None else (id(g), g._version) for g in gradients]

    def measure(self) -> None:
        """Take their norm and peak."""
        gradients = self.dense()
        self.norm = norm_of(gradients)
        self._peak = max(map(largest_of, gradients), default=0.0)

    def look(self) -> None:
        """Note what was done to them by hand since they were looked at last."""
        if not self.pending:
            self._look_for_assigned()
            return
        before, peak = self.norm, self._peak
        self.measure()
        if math.isfinite(self.norm) and not math.isfinite(before):
            self.factor = math.nan  # somebody has taken an overflow out of them
        if not (math.isfinite(before) and math.isfinite(self.norm) and before * self.norm):
            return
        ratio = self.norm / before
        if abs(ratio - 1) <= 1e-3:
            return
        if self.factor > 1:
            if abs(ratio * self.factor - 1) < 1e-2:
                self.factor = 1.0  # divided by the scale
            elif ratio * self.factor < 1:
                self.factor = math.nan  # divided by the scale and clipped, or clipped to little
        changed = {"before": (before, peak), "after": (self.norm, self._peak)}
        self._record.note("changed", factor=self.factor, **changed)

    def _look_for_assigned(self) -> None:
        """Those that no backward has left were set by the training, as `p.grad = g`."""
        gradients = self.dense()
        if not gradients or self._used is None or self.versions() == self._used:
            return
        self.measure()
        if self.norm == 0:
            return
        factors = {getattr(gradient, "_scaled_by", math.nan) for gradient in gradients}
        self.factor = factors.pop() if len(factors) == 1 else math.nan
        self.pending = True
        self._open_window()

    def before_backward(self) -> None:
        """They may have been zeroed by hand, or not at all."""
        if self.pending and self.norm == 0 and not self._emptied:
            self.empty()
        self._before = [g.detach().clone() for g in self.dense()] if self.pending else []
        used = self._used or []
        self.stale = (
            0
            if self.pending
            else sum(
                version == old and p.grad is not None and bool(values_of(p.grad).any())
                for p, version, old in zip(self.weights, self.versions(), used, strict=False)
            )
        )

    def unscale(self, scale: float) -> None:
        """A scaler has looked for an overflow and divided them."""
        self.factor /= scale
        self._looked = self.window.forced
        self.measure()
        self._unscaled = self.norm

    def empty(self) -> None:
        """They were zeroed before any step has used them."""
        self.window.dropped.append(self._record.note("zero_grad"))
        self.window.lost = len(self.window.backwards)
        self.window.stale = 0
        self.factor, self.norm, self._peak = 1.0, 0.0, 0.0
        self._emptied = True

    def is_due(self) -> bool:
        """Whether the next window is one to make overflow."""
        due = sum(number <= self.windows for number in self._overflows)
        return self._overflown < due

    def add(self, backward: Event, *, may_force: bool) -> bool:
        """A backward has added to them.

        Args:
            backward: The backward.
            may_force: Whether they may be made to overflow now.

        Returns:
            Whether they were.
        """
        loss: Loss = backward.loss
        left_out = self._emptied and self._looked  # the loop has left the step out by itself
        if self.window.steps or not self.window.backwards or left_out:
            self._forces = may_force and self.is_due()
            self._open_window()
            self.window.stale = self.stale
        first = self._emptied or not self.window.backwards
        self.window.backwards.append(backward)
        forces = bool(first and loss.scale and self._forces and self._forced < _MOST_OVERFLOWS)
        if forces:
            for gradient in self.dense():
                gradient.detach().fill_(math.inf)
            self._overflown += not self.window.forced
            self.window.forced = True
            self._forced += 1
        if loss.has_gradient and not loss.scale:
            self.factor = math.nan  # that of the gradient it was given
        elif not (self.pending and loss.scale is None and self.factor != 1.0):
            self.factor, self.scaler = loss.scale or 1.0, loss.scaler
        self.pending, self._emptied, self.updates = True, False, 0
        self.scale = loss.scale
        self.measure()
        return forces

    def norm_added(self) -> float:
        """The norm of what the newest backward has added."""
        now = self.dense()
        if len(now) != len(self._before):  # the first, or one that reached others
            return norm_of(now)
        return norm_of([a - b for a, b in zip(now, self._before, strict=True)])

    def _open_window(self) -> None:
        self.window = Window(self.number)
        self.windows += 1
        self._forced, self._looked, self._unscaled = 0, False, None
        self._record.windows.append(self.window)

    def step(self, *, skipped: bool, divisor: float = 1.0, **known: Any) -> None:
        """The optimizer steps with them, or a scaler skips that.

        Args:
            skipped: Whether the step is skipped.
            divisor: What the step itself divides them by.
            known: What else is known of the step.
        """
        dtypes = {str(p.dtype) for p in self.weights if p.requires_grad}
        self._record.weights |= {dtype.removeprefix("torch.") for dtype in dtypes}
        self.measure()
        event = self._record.note(
            "step",
            optimizer=self.number,
            skipped=skipped,
            again=not self.pending and self.norm > 0,
            factor=self.factor / divisor,
            norm=self.norm / divisor,
            unscaled=self.norm / divisor if self._unscaled is None else self._unscaled,
            backwards=self.window.backwards,
            updates=self.updates,
            rates=[group.get("lr") for group in self._optimizer.param_groups],
            **known,
        )
        if self.pending or self.norm:  # there are some
            self.window.steps.append(event)
        self.pending, self.factor = False, 1.0
        self.note_used()

    def note_used(self) -> None:
        """Keep what a step has used: what differs from it later is new."""
        self._used = self.versions()
