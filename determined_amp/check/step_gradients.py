"""Follows the gradients of an optimizer: what multiplies and what changes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
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

    A window is open from its first backward until a step uses its gradients, or is left
    out. Whenever code of the user's may have changed the gradients, they are measured,
    and compared with what was measured before.

    Args:
        optimizer: The optimizer.
        record: What happens to the gradients is noted there.
        overflows: Makes them overflow in some windows.

    Attributes:
        number: The place of the optimizer among all.
        factor: What the gradients are multiplied by; NaN if that is not known.
        scale: What the newest backward was scaled by.
        clipped: Whether torch has clipped them since they were measured.
        norms: That of each, in the order of the weights, when they were measured last.
        reached: The weights that had a gradient other than 0 whenever it was measured.
        window: The newest.
        is_new: Whether autograd has computed something since the newest step.
    """

    def __init__(
        self, optimizer: Optimizer, record: Record, overflows: ForcedOverflows
    ) -> None:
        self.number = record.optimizers
        self.factor = 1.0
        self.scale: float | None = None
        self.clipped = False
        self.norms: list[float] = []
        self.reached: set[torch.Tensor] = set()
        self.is_new = False
        self.window = StepWindow(self.number)
        self.overflows = overflows
        self._optimizer = optimizer
        self._record = record
        self._sample = torch.zeros(0)  # some numbers, when they were measured last
        self._used: list[Key] = []  # the gradients of the newest step
        self._are_used = False  # those that the backward which runs adds to
        # The overflow of this window is taken back while a backward adds to it.
        self._taken_back = False
        self._to_force = 0  # overflows that this window may still get
        self._overflown = 0  # windows that were made to overflow
        self._usually = 1.0  # `by_hand` of the newest window without an overflow
        # Of the newest step: what is known of it, what it divides them by itself, its
        # gradients when it began, and the 16-bit weights then.
        self._step: dict[str, Any] = {}
        self._divisor = 1.0
        self._begun: list[Key] = []
        self._halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_rounded: bool | None = None  # the weights, after the newest step
        record.optimizers += 1

    @property
    def is_open(self) -> bool:
        """Whether there are gradients that no step has used, or has left out."""
        window = self.window
        return window.place > 0 and not (window.steps or window.left_out)

    @property
    def norm(self) -> float:
        """That of all of them together, when they were measured last."""
        return math.hypot(*self.norms)

    @property
    def weights(self) -> list[torch.Tensor]:
        """What they are the gradients of."""
        return parameters_of(self._optimizer)

    @unheard
    def has_any_of(self, gradients: Set[torch.Tensor]) -> bool:
        """Whether some of these are among them."""
        return not gradients.isdisjoint(weight.grad for weight in self.weights)

    @unheard
    def versions(self) -> list[Key]:
        """What differs as soon as a gradient is another or has other values."""
        return [version_key(weight) for weight in self.weights]

    def measure(self) -> None:
        """Take the norm of each, and a few of their numbers."""
        weights = self.weights
        numbers = [_numbers_of(weight) for weight in weights]
        self.norms = [float(torch.linalg.vector_norm(each)) for each in numbers]
        few = [each[:: max(1, len(each) // _SAMPLED)] for each in numbers]
        self._sample = torch.cat([torch.zeros(0), *few])
        norms = zip(weights, self.norms, strict=True)
        self.reached.update(weight for weight, norm in norms if norm)

    def _open_window(self) -> None:
        self.overflows.forget(self.weights)
        self.window = StepWindow(self.number, self.window.place + 1)
        self.clipped = False
        self._record.windows.append(self.window)

    # Between a backward and the step.

    @unheard
    def look(self) -> None:
        """Note what code of the user's has done since they were measured last."""
        if not self.is_open:
            self._look_for_new()
        elif not self.overflows.are_in(self.weights):
            norm, sample = self.norm, self._sample
            self.measure()
            if not self.clipped:
                self._compare(norm, sample)
            self.clipped = False

    def _compare(self, norm: float, sample: torch.Tensor) -> None:
        """Note how they differ from what was measured before."""
        window, now = self.window, self._sample
        ratio = self.norm / norm if norm else math.nan
        if abs(ratio - 1) > 1e-3:
            window.by_hand *= ratio
        is_same_size = len(sample) == len(now)
        is_multiple = is_same_size and torch.allclose(now, ratio * sample, rtol=0.01)
        if self.norm and not is_multiple:
            window.rewritten = True
        if self.factor > SCALED:
            if is_same_size:
                change = float(torch.linalg.vector_norm(now - sample))
                window.added = math.hypot(window.added, change / self.factor)
            if not ratio * self.factor > 1.01:
                self.factor = math.nan  # divided by the scale, and clipped perhaps

    def _look_for_new(self) -> None:
        """Gradients of no backward were set by the training, as `p.grad = g`."""
        versions = self.versions()
        if not self._used or versions == self._used:
            return
        self.measure()
        # Zeroing in place sets them, too; what a step has used may have been clipped.
        if self.norm and (self.is_new or not _are_same(versions, self._used)):
            self.factor = math.nan
            self._open_window()

    @unheard
    def look_for_zeros(self) -> None:
        """Note if they were zeroed before any step has used them."""
        window = self.window
        if self.is_open and not window.is_empty and not any(self._are_other_than_0()):
            window.zeroed += self._record.of("zero_grad")[-1:]
            window.lost, window.stale = len(window.backwards), False
            self.factor, self.norms = 1.0, []
            self.overflows.forget(self.weights)

    def _are_other_than_0(self) -> Iterator[bool]:
        for weight in self.weights:
            yield weight.grad is not None and bool(values_of(weight.grad).any())

    @unheard
    def before_backward(self) -> None:
        """They may have been zeroed, by hand perhaps, or not at all."""
        self.look_for_zeros()
        self._taken_back = self.overflows.are_untouched(self.weights)
        if self._taken_back:
            self.overflows.give_back(self.weights)
        self._are_used = not self.is_open and self._has_used()

    def _has_used(self) -> bool:
        """Whether a step has used some of them, which may be changed in place since."""
        now, are_there = self.versions(), self._are_other_than_0()
        for key, used, is_there in zip(now, self._used, are_there, strict=False):
            is_used = key == used or (key[0] == used[0] and not self.is_new)
            if is_used and is_there:
                return True
        return False

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
        before = self.norm if self.is_open else 0.0
        if not (self.is_open and self.window.backwards):
            self._to_force = _MOST_OVERFLOWS if may_force and self.is_due() else 0
            # The overflow of a step that was left out is in this window, too.
            is_forced = self.window.left_out and self._taken_back
            self._open_window()
            self.window.stale, self.window.forced = self._are_used, is_forced
        window, loss = self.window, backward.loss
        is_first = window.is_empty or not window.backwards
        window.backwards.append(backward)
        self.scale = loss.scale
        if loss.scale:
            self.factor = loss.scale
        elif loss.has_gradient:
            self.factor = math.nan  # that of the gradient it was given
        self.measure()
        backward.added = math.hypot(backward.added, self.norm - before)
        forces = bool(loss.scale) and is_first and self._to_force > 0
        if forces:
            self._force_overflow()
        return forces

    def _force_overflow(self) -> None:
        self.overflows.make(self.weights)
        self._taken_back = False
        self._to_force -= 1
        self._overflown += not self.window.forced
        self.window.forced = True

    @unheard
    def after_backward(self) -> None:
        """The gradients of a window that was made to overflow do so again."""
        if self._taken_back:
            self.overflows.make(self.weights)
            self._taken_back = False

    # The step.

    @unheard
    def update(self) -> None:
        """The scale is updated: a step that was prepared, and not made, is left out."""
        self.look()
        if self.is_open and self.window.unscales:
            self.window.left_out = True
            self._used, self.is_new = self.versions(), False

    @unheard
    def begin_step(self, *, skipped: bool, divisor: float = 1.0) -> None:
        """The optimizer is about to step with them, or a scaler has skipped that.

        Args:
            skipped: Whether it changes nothing.
            divisor: What the step itself divides them by.
        """
        self.look()
        self.window.left_out = False  # it is made after the update
        weights = self.weights
        gave_back = not skipped and self.overflows.give_back(weights, self._usually)
        self.measure()
        if not self.window.forced:
            self._usually = self.window.by_hand
        self._begun = self.versions()
        self._divisor = divisor
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        halves = [weight for weight in weights if weight.dtype in SIXTEEN_BITS]
        self._halves = [(weight, weight.detach().clone()) for weight in halves]
        self._step = {
            "skipped": skipped,
            "again": not self.is_open,
            "overflows": gave_back,
            "rates": rates,
            "rate": float((rates or [0])[0] or 0),
            "rounded": self._is_rounded is False and are_rounded(weights),
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
        measured = {
            "norm": norm,
            "norms": norms,
            "unclipped": norm if window.unclipped is None else window.unclipped,
            "added": window.added,
        }
        multiplied = {
            "factor": self.factor / self._divisor,
            "by_hand": window.by_hand,
            "divided": bool(window.unscales) or self._divisor != 1,
        }
        known |= {"optimizer": self.number, "lost": _share_lost(self._halves)}
        step = self._record.note(
            "step", **measured, **multiplied, **self._step, **known
        )
        if self.is_open or norm:  # there are some
            window.steps.append(step)
        for backward in window.used:
            backward.divided = backward.divided or step.scaled
        weights = [weight for weight in self.weights if weight.requires_grad]
        self._record.weights |= {dtype_name(weight.dtype) for weight in weights}
        self._is_rounded = are_rounded(self.weights)
        self._used, self.factor, self.is_new = self.versions(), 1.0, False

    def _norms_of_step(self) -> list[float]:
        """Those of what it has used: hooks and the step itself may change that."""
        now = self.versions()
        norms = [norm / self._divisor for norm in self.norms]
        if now == self._begun or not _are_same(now, self._begun):
            return norms
        before = math.hypot(*norms)
        self.measure()
        if not self.norm:  # it has zeroed them
            return norms
        self.window.by_hand *= self.norm / before if before else 1.0
        return self.norms


def _numbers_of(weight: torch.Tensor) -> torch.Tensor:
    """Those of its gradient, in float32; none without one."""
    if weight.grad is None:
        return torch.zeros(0)
    return values_of(weight.grad).float().flatten()


def _are_same(keys: Sequence[Key], others: Sequence[Key]) -> bool:
    """Whether gradients are the same tensors, whatever their values are."""
    return [gradient for gradient, _ in keys] == [gradient for gradient, _ in others]


# The weights of a step.


@unheard
def are_rounded(weights: Sequence[torch.Tensor]) -> bool:
    """Whether all float32 weights are exactly 16-bit numbers."""
    full = [weight.detach() for weight in weights if weight.dtype is torch.float32]
    for dtype in SIXTEEN_BITS if full else ():
        if all(torch.equal(each, each.to(dtype).float()) for each in full):
            return True
    return False


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
