"""Follows the gradients of an optimizer: what multiplies and what changes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from determined_amp.amp.tensors import (
    SIXTEEN_BITS,
    dtype_name,
    parameters_of,
    values_of,
)
from determined_amp.check.interventions import ForcedOverflows, Key, version_key
from determined_amp.check.record import Event, Record, StepWindow
from determined_amp.check.stand_in import unheard

# Gradients that are multiplied by more than this are still scaled.
SCALED = 1.5

# So often a window is made to overflow: what the first backward leaves may be zeroed
# before the step, as the gradients that a generator's loss leaves in the discriminator
# are.
_MOST_OVERFLOWS = 2

# Numbers of each gradient that are compared before and after a change.
_SAMPLED = 256


class StepGradients:
    """The gradients that one optimizer steps with.

    Args:
        optimizer: The optimizer.
        record: What happens to the gradients is noted there.
        overflows: Makes them overflow in some windows.

    Attributes:
        number: The place of the optimizer among all.
        factor: What the gradients are multiplied by; NaN if that is not known.
        scale: What the newest backward was scaled by.
        pending: Whether there are gradients that no step has used.
        clipped: Whether torch has clipped them since they were looked at.
        norms: That of each, in the order of the weights, when they were looked at last.
        reached: The weights that had a gradient other than 0 in any look.
        window: The newest.
        is_new: Whether autograd has computed something since the newest step.
    """

    def __init__(
        self, optimizer: Optimizer, record: Record, overflows: ForcedOverflows
    ) -> None:
        self.number = record.optimizers
        self.factor = 1.0
        self.scale: float | None = None
        self.pending = False
        self.clipped = False
        self.norms: list[float] = []
        self.reached: set[torch.Tensor] = set()
        self.is_new = False
        self.window = StepWindow(self.number)
        self.overflows = overflows
        self._optimizer = optimizer
        self._record = record
        self._stale = 0  # gradients that a step has used and nobody has zeroed since
        self._used: list[Key] = []  # of the newest step
        self._values = torch.zeros(0)  # some of them, when they were looked at last
        self._to_force = 0  # overflows that this window may still get
        self._overflown = 0  # windows that were made to overflow
        self._usually = 1.0  # `by_hand` of the newest window without an overflow
        # Of the newest step: what is known of it, what it divides them by itself, its
        # gradients when it began, and the 16-bit weights then.
        self._step: dict[str, Any] = {}
        self._divisor = 1.0
        self._begun: list[Key] = []
        self._halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_rounded: bool | None = None  # the weights, at the newest look
        # The true gradients are back while a backward adds to them.
        self._goes_on = False
        record.optimizers += 1

    @property
    def norm(self) -> float:
        """That of all of them together, when they were looked at last."""
        return math.hypot(*self.norms)

    @property
    def weights(self) -> list[torch.Tensor]:
        """What they are the gradients of."""
        return parameters_of(self._optimizer)

    @unheard
    def dense(self) -> list[torch.Tensor]:
        """Those there are."""
        gradients = (p.grad for p in self.weights if p.grad is not None)
        return [values_of(g) if g.is_sparse else g for g in gradients]

    def versions(self) -> list[Key]:
        """What differs as soon as a gradient is another or has other values."""
        return [version_key(weight) for weight in self.weights]

    def measure(self) -> None:
        """Take the norm of each, and a few of their numbers, in float32."""
        weights = self.weights
        gradients = [weight.grad for weight in weights]
        none = torch.zeros(0)
        dense = [none if g is None else values_of(g) for g in gradients]
        flat = [each.detach().float().flatten() for each in dense]
        self.norms = [float(torch.linalg.vector_norm(each)) for each in flat]
        norms = zip(weights, self.norms, strict=True)
        self.reached.update(weight for weight, norm in norms if norm)
        few = [gradient[:: max(1, len(gradient) // _SAMPLED)] for gradient in flat]
        self._values = torch.cat([none, *few])

    # Between a backward and the step.

    @unheard
    def look(self) -> None:
        """Note what code of the user's has done since they were looked at last."""
        if not self.pending:
            self._look_for_new()
        elif not self.overflows.are_in(self.weights):
            norm, values = self.norm, self._values
            self.measure()
            if not self.clipped:
                self._compare(self.norm / norm if norm else math.nan, values)
            self.clipped = False

    def _compare(self, ratio: float, before: torch.Tensor) -> None:
        if abs(ratio - 1) > 1e-3:
            self.window.by_hand *= ratio
        same_size = len(before) == len(self._values)
        if self.norm and not (
            same_size and torch.allclose(self._values, ratio * before, rtol=0.01)
        ):
            self.window.rewritten = True
        if self.factor > SCALED:
            if same_size:
                change = float(torch.linalg.vector_norm(self._values - before))
                self.window.added = math.hypot(self.window.added, change / self.factor)
            if not ratio * self.factor > 1.01:
                self.factor = math.nan  # divided by the scale, and clipped perhaps

    def _look_for_new(self) -> None:
        """Gradients of no backward were set by the training, as `p.grad = g`."""
        versions = self.versions()
        if self._used and versions != self._used and self.dense():
            self.measure()
            is_same = [g for g, _ in versions] == [g for g, _ in self._used]
            # Zeroing in place sets them, too; what a step has used may have been
            # clipped.
            if self.norm and (self.is_new or not is_same):
                self.pending, self.factor = True, math.nan
                self._open_window()

    @unheard
    def before_backward(self) -> None:
        """They may have been zeroed, by hand perhaps, or not at all."""
        self.look_for_zeros()
        self._goes_on = self.overflows.are_untouched(self.weights)
        if self._goes_on:  # the backward adds to the true ones
            self.overflows.give_back(self.weights)
        self._stale = 0
        if not self.pending:
            now = zip(self.weights, self.versions(), self._used, strict=False)
            same = (p.grad for p, key, used in now if self._is_used(key, used))
            left = [each for each in same if each is not None]
            self._stale = sum(bool(values_of(gradient).any()) for gradient in left)

    def _is_used(self, now: tuple[int, int], used: tuple[int, int]) -> bool:
        """Whether it is a gradient that a step has used, perhaps changed in place."""
        return now == used or (now[0] == used[0] and not self.is_new)

    @unheard
    def look_for_zeros(self) -> None:
        """Note if they were zeroed before any step has used them."""
        looks = self.pending and not self.window.is_empty
        if looks and not any(bool(gradient.any()) for gradient in self.dense()):
            self.window.zeroed += self._record.of("zero_grad")[-1:]
            self.window.lost, self.window.stale = len(self.window.backwards), 0
            self.factor, self.norms = 1.0, []
            self.overflows.forget(self.weights)

    @unheard
    def unscale(self, scale: float) -> None:
        """A scaler has looked for an overflow and divided them."""
        self.factor /= scale
        self.overflows.divide(self.weights, scale)
        self.window.unscales.append(self._record.note("unscale"))
        self.measure()
        self.window.unclipped = self.norm

    def is_due(self) -> bool:
        """Whether the next window is one to make overflow."""
        due = sum(number <= self.window.place for number in self.overflows.windows)
        return due > self._overflown

    @unheard
    def add(self, backward: Event, *, may_force: bool) -> bool:
        """A backward has added to them.

        Args:
            backward: The backward.
            may_force: Whether they may be made to overflow now.

        Returns:
            Whether they were.
        """
        window = self.window
        # Where the scaler has looked, the loop has left the step out by itself.
        left_out = window.is_empty and window.unclipped is not None and window.forced
        if window.steps or left_out or not window.backwards:
            self._to_force = _MOST_OVERFLOWS if may_force and self.is_due() else 0
            self._open_window()
            self.window.stale = self._stale
        is_first = self.window.is_empty or not self.window.backwards
        scale = backward.loss.scale
        begins = bool(scale) and is_first and self._to_force > 0
        if self.window.left_out and not self.window.is_empty:
            self.window.kept.append(backward)
        self.window.backwards.append(backward)
        if backward.loss.has_gradient and not scale:
            self.factor = math.nan  # that of the gradient it was given
        elif scale:
            self.factor = scale
        before = self.norm if self.pending else 0.0
        self.pending, self.scale = True, scale
        self.measure()
        backward.added = math.hypot(backward.added, self.norm - before)
        if begins:
            self.overflows.make(self.weights)
            self._goes_on = False
            self._to_force -= 1
            self._overflown += not self.window.forced
            self.window.forced = True
        return begins

    @unheard
    def after_backward(self) -> None:
        """The gradients of a window that was made to overflow do so again."""
        if self._goes_on:
            self.overflows.make(self.weights)
            self._goes_on = False

    def _open_window(self) -> None:
        self.overflows.forget(self.weights)
        self.window = StepWindow(self.number, self.window.place + 1)
        self.clipped = False
        self._record.windows.append(self.window)

    # The step.

    @unheard
    def begin_step(self, *, skipped: bool, divisor: float = 1.0) -> None:
        """The optimizer is about to step with them, or a scaler has skipped that.

        Args:
            skipped: Whether it changes nothing.
            divisor: What the step itself divides them by.
        """
        self.look()
        gave_back = not skipped and self.overflows.give_back(
            self.weights, self._usually
        )
        self.measure()
        if not self.window.forced:
            self._usually = self.window.by_hand
        was_rounded, self._is_rounded = self._is_rounded, are_rounded(self.weights)
        self._begun = self.versions()
        self._halves = [
            (weight, weight.detach().clone())
            for weight in self.weights
            if weight.dtype in SIXTEEN_BITS
        ]
        self._divisor = divisor
        self._step = {
            "skipped": skipped,
            "again": not self.pending,
            "overflows": gave_back,
            "rates": [group.get("lr") for group in self._optimizer.param_groups],
            "rounded": self._is_rounded and was_rounded is False,
        }

    @unheard
    def end_step(self, **known: Any) -> None:
        """The optimizer has stepped with them, or a scaler has skipped that.

        Args:
            known: What else is known of the step.
        """
        window, norms = self.window, self._norms_of_step()
        norm = math.hypot(*norms)
        self._step["again"] &= norm != 0
        step = self._record.note(
            "step",
            optimizer=self.number,
            norm=norm,
            norms=norms,
            unclipped=norm if window.unclipped is None else window.unclipped,
            added=window.added,
            factor=self.factor / self._divisor,
            by_hand=window.by_hand,
            divided=bool(window.unscales) or self._divisor != 1,
            lost=_share_lost(self._halves),
            **self._step,
            **known,
        )
        weights = (weight for weight in self.weights if weight.requires_grad)
        self._record.weights |= {dtype_name(weight.dtype) for weight in weights}
        if self.pending or norm:  # there are some
            window.steps.append(step)
        for backward in window.used:
            backward.divided = backward.divided or step.scaled
        self._is_rounded = are_rounded(self.weights)
        self.pending, self.factor, self.is_new = False, 1.0, False
        self._used = self.versions()

    def _norms_of_step(self) -> list[float]:
        """Those of what it has used: hooks and the step itself may change that."""
        norms, now = [norm / self._divisor for norm in self.norms], self.versions()
        is_same = [g for g, _ in now] == [g for g, _ in self._begun]
        if is_same and now != self._begun:
            norm = math.hypot(*norms)
            self.measure()
            if self.norm:  # it has not zeroed them
                self.window.by_hand *= self.norm / norm if norm else 1.0
                return self.norms
        return norms


@unheard
def are_rounded(weights: Sequence[torch.Tensor]) -> bool:
    """Whether all float32 weights are exactly 16-bit numbers."""
    exact = [each.detach() for each in weights if each.dtype is torch.float32]
    return any(
        all(torch.equal(each, each.to(dtype).float()) for each in exact)
        for dtype in (SIXTEEN_BITS if exact else ())
    )


def _share_lost(halves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The share of 16-bit weights with a gradient that a step has not changed.

    Args:
        halves: The weights, each with what it was before the step.
    """
    same, pulled = 0, 0
    for weight, before in halves:
        if weight.grad is not None:
            has_gradient = values_of(weight.grad) != 0
            same += int((has_gradient & (weight.detach() == before)).sum())
            pulled += int(has_gradient.sum())
    return same / max(pulled, 1)
