"""Follows the gradients of an optimizer: what multiplies them, and what happens to
them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch.optim import Optimizer

from determined_amp.amp.tensors import parameters_of, values_of
from determined_amp.amp.torch_private import version_of
from determined_amp.check.record import Event, Record, Schedule, StepWindow

Versions = list[tuple[int, int]]

# So often a window is made to overflow: what the first backward leaves may be zeroed
# before the step, as the gradients that a generator's loss leaves in the discriminator
# are.
_MOST_OVERFLOWS = 2


class StepGradients:
    """The gradients that one optimizer steps with.

    Args:
        optimizer: The optimizer.
        record: What happens to them is noted there.
        overflows: Windows of them that are made to overflow.
    """

    def __init__(
        self, optimizer: Optimizer, record: Record, overflows: Collection[int]
    ) -> None:
        self.number = record.optimizers  # the place of the optimizer among all
        self.factor = 1.0  # what they are multiplied by; NaN if that is not known
        self.scale: float | None = None  # that the newest backward was scaled by
        self.pending = False  # there are some that no step has used
        self.norm = 0.0  # when they were looked at last
        self.clipped = False  # by torch, since they were looked at
        self.window = StepWindow(self.number)  # the newest
        self._optimizer = optimizer
        self._record = record
        self._overflows = overflows
        self._stale = (
            0  # of them, those that a step has used and nobody has zeroed since
        )
        self._emptied = False  # after the newest backward
        self._to_force = 0  # overflows in this window
        self._overflown = 0  # windows that were made to overflow
        self._used: Versions = []  # by the newest step
        self._unclipped: float | None = None  # the norm that the scaler left
        self._by_hand = 1.0  # what code of the user's has multiplied their norm by
        self._rates: list[Any] | None = None  # at the newest step
        self._stepped = self.window  # that of the newest step
        record.optimizers += 1

    @property
    def weights(self) -> list[torch.Tensor]:
        """What they are the gradients of."""
        return parameters_of(self._optimizer)

    def dense(self) -> list[torch.Tensor]:
        """Those there are."""
        gradients = (p.grad for p in self.weights if p.grad is not None)
        return [values_of(g) if g.is_sparse else g for g in gradients]

    def versions(self) -> Versions:
        """What differs as soon as one of them is another or has other values."""
        gradients = (p.grad for p in self.weights)
        return [(0, 0) if g is None else (id(g), version_of(g)) for g in gradients]

    def measure(self) -> None:
        """Take the norm of all of their numbers together, in float32."""
        norms = [
            torch.linalg.vector_norm(each.detach().float()) for each in self.dense()
        ]
        self.norm = math.hypot(*map(float, norms))

    def look(self) -> None:
        """Note what code of the user's has done to them since they were looked at
        last.
        """
        if not self.pending:
            # Those that no backward has left were set by the training, as `p.grad = g`.
            if self._used and self.versions() != self._used and self.dense():
                self.measure()
                if self.norm:  # zeroing in place sets them, too
                    self.pending, self.factor = True, math.nan
                    self._open_window()
            return
        before = self.norm
        self.measure()
        if self.clipped:
            self.clipped = False
            return
        ratio = self.norm / before if before else math.nan
        if abs(ratio - 1) > 1e-3:
            self._by_hand *= ratio
        if self.factor > 1.5 and not ratio * self.factor > 1.01:
            self.factor = math.nan  # divided by the scale, and clipped perhaps

    def before_backward(self) -> None:
        """They may have been zeroed, by hand perhaps, or not at all."""
        self.look_for_zeros()
        self._stale = 0
        if not self.pending:
            now = zip(self.weights, self.versions(), self._used, strict=False)
            same = [
                p.grad
                for p, version, old in now
                if version == old and p.grad is not None
            ]
            self._stale = sum(bool(values_of(gradient).any()) for gradient in same)

    def look_for_zeros(self) -> None:
        """Note if they were zeroed before any step has used them."""
        looks = self.pending and not self._emptied
        if looks and not any(bool(gradient.any()) for gradient in self.dense()):
            self.window.zeroed += self._record.of("zero_grad")[-1:]
            self.window.lost, self.window.stale = len(self.window.backwards), 0
            self.factor, self.norm, self._emptied = 1.0, 0.0, True

    def unscale(self, scale: float) -> None:
        """A scaler has looked for an overflow and divided them."""
        self.factor /= scale
        self.window.unscales.append(self._record.note("unscale"))
        self.measure()
        self._unclipped = self.norm

    def is_due(self) -> bool:
        """Whether the next window is one to make overflow."""
        return (
            sum(number <= self.window.place for number in self._overflows)
            > self._overflown
        )

    def add(self, backward: Event, *, may_force: bool) -> bool:
        """A backward has added to them.

        Args:
            backward: The backward.
            may_force: Whether they may be made to overflow now.

        Returns:
            Whether they were.
        """
        # Where the scaler has looked, the loop has left the step out by itself.
        left_out = self._emptied and self._unclipped is not None and self.window.forced
        if self.window.steps or not self.window.backwards or left_out:
            self._to_force = _MOST_OVERFLOWS if may_force and self.is_due() else 0
            self._open_window()
            self.window.stale = self._stale
        scale, is_first = (
            backward.loss.scale,
            self._emptied or not self.window.backwards,
        )
        forces = bool(scale) and is_first and self._to_force > 0
        if forces:
            self._force()
        self.window.backwards.append(backward)
        if backward.loss.has_gradient and not scale:
            self.factor = math.nan  # that of the gradient it was given
        elif scale:
            self.factor = scale
        before = self.norm if self.pending else 0.0
        self.pending, self._emptied, self.scale = True, False, scale
        self.measure()
        backward.added = math.hypot(backward.added, self.norm - before)
        return forces

    def _force(self) -> None:
        """Make them overflow."""
        for weight in self.weights:
            if weight.grad is not None:
                # Through `data`, which is a copy of a sparse one: it is no change of
                # the user's.
                weight.grad.data = weight.grad.data.mul_(math.inf)
        self._to_force -= 1
        self._overflown += not self.window.forced
        self.window.forced = True

    def _open_window(self) -> None:
        self.window = StepWindow(self.number, self.window.place + 1)
        self._unclipped, self._by_hand = None, 1.0
        self._record.windows.append(self.window)

    def step(self, *, divisor: float = 1.0, **known: Any) -> None:
        """The optimizer steps with them, or a scaler skips that.

        Args:
            divisor: What the step itself divides them by.
            known: What else is known of the step.
        """
        dtypes = {str(p.dtype) for p in self.weights if p.requires_grad}
        self._record.weights |= {dtype.removeprefix("torch.") for dtype in dtypes}
        self.measure()
        norm = self.norm / divisor
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        again = not self.pending and norm != 0
        step = self._record.note(
            "step", optimizer=self.number, again=again, norm=norm, **known
        )
        step.factor, step.by_hand = self.factor / divisor, self._by_hand
        step.unclipped = norm if self._unclipped is None else self._unclipped
        step.rates = rates
        if self._rates not in (None, rates):
            self._move_by_hand()
        if self.pending or norm:  # there are some
            self.window.steps.append(step)
        for backward in self.window.used:
            backward.divided = backward.divided or step.scaled
        self._rates, self._stepped = rates, self.window
        self.pending, self.factor = False, 1.0
        self.note_used()

    def _move_by_hand(self) -> None:
        """The rate has moved since the last step; no scheduler does that if the record
        has none.
        """
        schedules = [
            each for each in self._record.schedules if each.optimizer == self.number
        ]
        if not schedules:
            schedules = [Schedule("rate by hand", None, self.number, by_hand=True)]
            self._record.schedules += schedules
        if schedules[0].by_hand:
            move = self._record.note("move", schedule=schedules[0])
            move.where = None
            self._stepped.moves.append(move)

    def note_used(self) -> None:
        """Keep what a step has used: what differs from it later is new."""
        self._used = self.versions()
