"""Follows the gradients of one optimizer from a backward to its step.

It answers what multiplies the gradients, and what the user's code did to them. The
recorder calls it at each backward, unscale, clip, update and step. It notes each step
in the record. In some windows it makes the gradients overflow: a correct training skips
these steps, and all its other updates are the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence, Set
from typing import Any

import torch
from torch.optim import Optimizer

from determined_amp.amp.tensors import (
    SIXTEEN_BITS,
    dtype_name,
    parameters_of,
    values_of,
)
from determined_amp.amp.torch_private import version_of
from determined_amp.check.record import Event, Record, StepWindow
from determined_amp.check.stand_in import unheard

# The identity of a gradient tensor, and the version of its values.
Key = tuple[int, int]

# Gradients with a larger factor are still scaled.
SCALED = 1.5

# A mask replaces infinity, -infinity and NaN by at most this many numbers.
_MASKS = 3

# About how many numbers of each gradient are compared before and after a change.
_SAMPLED = 256

# How often the gradients of one window may be made to overflow. The training may zero
# those of the first backward, such as the ones that a generator's loss leaves in the
# discriminator.
_MOST_OVERFLOWS = 2


class StepGradients:
    """The gradients that one optimizer steps with.

    A window is open from its first backward until a step uses its gradients or the
    training leaves them out. Whenever the user's code may have changed the gradients,
    they are measured and compared with the measurement before.

    Args:
        optimizer: The optimizer.
        record: Where events and windows are noted.
        windows_to_force: The windows, counted from 0, in which the gradients are made
            to overflow.

    Attributes:
        number: The number of the optimizer.
        factor: What multiplies the gradients; NaN if unknown.
        clipped: Whether torch has clipped the gradients since the last measurement.
        norms: The norm of each gradient at the last measurement, in the order of the
            weights.
        trained_weights: The weights whose gradient was not 0 at some measurement.
        window: The newest window.
        computed_since_step: Whether autograd has computed gradients since the last
            step, or since the gradients were left out.
        overflows: Whether the gradients were made to overflow. Until they are zeroed or
            stepped with, they are not measured.
    """

    def __init__(
        self, optimizer: Optimizer, record: Record, windows_to_force: Collection[int]
    ) -> None:
        self.number = record.optimizers
        self.factor = 1.0
        self.clipped = False
        self.norms: list[float] = []
        self.trained_weights: set[torch.Tensor] = set()
        self.computed_since_step = False
        self.window = StepWindow(self.number)
        self.overflows = False
        # Whether the user's code has masked the overflow before another backward.
        self._is_masked = False
        self._windows_to_force = windows_to_force
        self._optimizer = optimizer
        self._record = record
        self._sample = torch.zeros(0)  # a few numbers at the last measurement
        self._used: list[Key] = []  # gradients of the last step, made or left out
        # By weight: the norm of its gradient before hooks of the user's change it.
        self._arrived: dict[torch.Tensor, float] = {}
        # Whether the running backward adds to gradients that a step has used.
        self._adds_to_used = False
        self._to_force = 0  # overflows that this window may still get
        self._forced_windows = 0  # windows that were made to overflow
        # The running step: its attributes as an event, what the optimizer divides the
        # gradients by, the gradients at its beginning, and the 16-bit weights with
        # their values at its beginning.
        self._step: dict[str, Any] = {}
        self._divisor = 1.0
        self._keys_at_begin: list[Key] = []
        self._weights_before: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Whether the weights were 16-bit numbers after the last step.
        self._is_rounded: bool | None = None
        record.optimizers += 1

    @property
    def is_open(self) -> bool:
        """Whether there are gradients that still wait for a step."""
        window = self.window
        return window.place > 0 and not (window.steps or window.left_out)

    @property
    def norm(self) -> float:
        """The norm of all gradients together at the last measurement."""
        return math.hypot(*self.norms)

    @property
    def weights(self) -> list[torch.Tensor]:
        """The parameters of the optimizer."""
        return parameters_of(self._optimizer)

    @unheard
    def has_any_of(self, gradients: Set[torch.Tensor]) -> bool:
        """Whether any of these tensors is a gradient of this optimizer."""
        return not gradients.isdisjoint(weight.grad for weight in self.weights)

    @unheard
    def versions(self) -> list[Key]:
        """A key for each gradient, which changes with its tensor and values."""
        return [version_key(weight) for weight in self.weights]

    def measure(self) -> None:
        """Take the norm of each gradient, and a sample of its numbers."""
        if self.overflows:
            return
        weights = self.weights
        numbers = [_numbers_of(weight.grad) for weight in weights]
        self.norms = [float(torch.linalg.vector_norm(each)) for each in numbers]
        few = [each[:: max(1, len(each) // _SAMPLED)] for each in numbers]
        self._sample = torch.cat([torch.zeros(0), *few])
        norms = zip(weights, self.norms, strict=True)
        self.trained_weights.update(weight for weight, norm in norms if norm)

    def _open_window(self) -> None:
        """Begin a new window."""
        # The gradients of a step that was left out bring their overflow along.
        self.overflows &= self.window.left_out
        self.window = StepWindow(self.number, self.window.place + 1)
        self.window.forced = self.overflows
        self.clipped = False
        self._record.windows.append(self.window)

    # Between a backward and the step.

    @unheard
    def note_changes(self) -> None:
        """Note what the user's code did to the gradients since the last measurement."""
        if not self.is_open:
            self._note_set_by_hand()
        elif not self.overflows:
            norm, sample = self.norm, self._sample
            self.measure()
            if not self.clipped:
                self._compare(norm, sample)
            self.clipped = False

    def _compare(self, norm: float, sample: torch.Tensor) -> None:
        """Note how the gradients differ from the last measurement.

        Args:
            norm: Their norm at that measurement.
            sample: Their sample at that measurement.
        """
        window, now = self.window, self._sample
        ratio = self.norm / norm if norm else math.nan
        if abs(ratio - 1) > 1e-3:
            window.by_hand *= ratio
        if 0 < self.norm < math.inf and not _is_multiple(now, sample, ratio):
            window.rewritten = True
        if self.factor > SCALED:
            self.factor = _known(self.factor, ratio)

    def _note_set_by_hand(self) -> None:
        """Begin a window if the training set a gradient itself: `p.grad = g`."""
        versions = self.versions()
        if not self._used or versions == self._used:
            return
        self.measure()
        # Zeroing in place and clips after the step change the keys, too.
        if self.norm and (
            self.computed_since_step or not _are_same(versions, self._used)
        ):
            self.factor = math.nan
            self._open_window()

    @unheard
    def note_zeros(self) -> None:
        """Note if the gradients were zeroed before a step has used them."""
        window = self.window
        if self.is_open and not window.is_empty and not any(self._are_other_than_0()):
            window.zeroed += self._record.of("zero_grad")[-1:]
            window.lost, window.stale = len(window.backwards), False
            self.factor, self.norms, self.overflows = 1.0, [], False

    def _are_other_than_0(self) -> Iterator[bool]:
        """Yield for each weight whether it has a gradient that is not 0."""
        for weight in self.weights:
            yield weight.grad is not None and bool(values_of(weight.grad).any())

    @unheard
    def before_backward(self) -> None:
        """Prepare for a backward. The user's code may have zeroed the gradients."""
        self.note_zeros()
        # The backward would hide a mask: it adds true gradients to it.
        self._is_masked |= self.overflows and self._looks_masked()
        self._arrived.clear()
        self._adds_to_used = not self.is_open and self._holds_used()

    def _holds_used(self) -> bool:
        """Whether a step used a gradient that is still there and not 0."""
        now, are_there = self.versions(), self._are_other_than_0()
        for key, used, is_there in zip(now, self._used, are_there, strict=False):
            # The training may have changed it in place since.
            is_used = key == used or (
                key[0] == used[0] and not self.computed_since_step
            )
            if is_used and is_there:
                return True
        return False

    @unheard
    def unscale(self, scale: float) -> None:
        """Note that a scaler has unscaled the gradients."""
        self.factor /= scale
        self.norms = [norm / scale for norm in self.norms]
        self._sample = self._sample / scale
        self.window.unscales.append(self._record.note("unscale"))
        self.measure()

    @unheard
    def note_arrival(self, weight: torch.Tensor, gradient: Any) -> None:
        """Note the gradient of a weight before a hook of the user's gets it."""
        has_weight = any(weight is each for each in self.weights)
        # A hook before the addition to an older gradient tells nothing of the sum.
        if has_weight and (weight.grad is None or weight.grad is gradient):
            norm = float(torch.linalg.vector_norm(_numbers_of(gradient)))
            self._arrived.setdefault(weight, norm)

    def _left_by_hooks(self) -> float:
        """What hooks of the user's have multiplied the norm of new gradients by."""
        now = dict(zip(self.weights, self.norms, strict=True))
        before = math.hypot(*self._arrived.values())
        after = math.hypot(*(now[weight] for weight in self._arrived))
        return after / before if before else 1.0

    def is_due(self) -> bool:
        """Whether the next window will be made to overflow."""
        due = sum(number <= self.window.place for number in self._windows_to_force)
        return due > self._forced_windows

    @unheard
    def note_backward(self, backward: Event, *, may_force: bool) -> bool:
        """Note that a backward has added to the gradients.

        Args:
            backward: The backward.
            may_force: Whether they may be made to overflow now.

        Returns:
            Whether they are to be made to overflow.
        """
        before = self.norm if self.is_open else 0.0
        if not (self.is_open and self.window.backwards):
            self._to_force = _MOST_OVERFLOWS if may_force and self.is_due() else 0
            self._open_window()
            self.window.stale = self._adds_to_used
        window, loss = self.window, backward.loss
        is_first = window.is_empty or not window.backwards
        window.backwards.append(backward)
        self.measure()
        by_hooks = self._left_by_hooks()
        if loss.scale:
            self.factor = _known(loss.scale, by_hooks)
        elif loss.has_gradient:
            self.factor = math.nan  # unknown: that of the gradient it began with
        backward.added = math.hypot(backward.added, self.norm - before)
        return bool(loss.scale) and is_first and self._to_force > 0

    @unheard
    def force_overflow(self) -> None:
        """Make the gradients of this window overflow."""
        for weight in self.weights:
            if weight.grad is not None:
                _write(weight.grad, weight.grad.data * math.inf)
        self._to_force -= 1
        self._forced_windows += not self.window.forced

    def share_overflow(self, weights: Set[torch.Tensor]) -> None:
        """Note that the gradients of these weights were made to overflow."""
        if not weights.isdisjoint(self.weights):
            self.window.forced = self.overflows = True
            self._is_masked = False

    @unheard
    def take_overflow_back(self) -> bool:
        """Replace an overflow by zeros, which endanger no weights and no moments.

        Returns:
            Whether there was an overflow, also if the user's code has masked it.
        """
        was_forced, norm, sample = self.overflows, self.norm, self._sample
        self.overflows = False
        self.measure()
        is_true = self._is_true_again(norm, sample) and not self._is_masked
        is_used = was_forced and not is_true
        for weight in self.weights if is_used else ():
            if weight.grad is not None:
                _write(weight.grad, torch.zeros_like(weight.grad))
        return is_used

    def _looks_masked(self) -> bool:
        """Whether the gradients are finite, and not the true ones."""
        norms, sample = self.norms, self._sample
        self.overflows = False
        self.measure()
        is_true = self._is_true_again(math.hypot(*norms), sample)
        is_masked = 0 < self.norm < math.inf and not is_true
        self.norms, self._sample, self.overflows = norms, sample, True
        return is_masked

    def _is_true_again(self, norm: float, sample: torch.Tensor) -> bool:
        """Whether the training has put true gradients back, from buffers of its own.

        Args:
            norm: The norm of the gradients before they were made to overflow.
            sample: A sample of them.
        """
        if not (norm and 0 < self.norm < math.inf):
            return False
        if len(self.window.backwards) > 1:  # nobody knows their sum
            return len(set(self._sample.abs().tolist())) > _MASKS
        return _is_multiple(self._sample, sample, self.norm / norm)

    # The step.

    @unheard
    def update(self) -> None:
        """Note that a scaler updates its scale.

        The gradients of a step that was only prepared, by `unscale_`, are left out.
        """
        self.note_changes()
        if self.is_open and self.window.unscales:
            self.window.left_out = True
            self._used, self.computed_since_step = self.versions(), False

    @unheard
    def begin_step(self, *, skipped: bool, divisor: float = 1.0) -> None:
        """Prepare for a step of the optimizer, or for one that a scaler has skipped.

        Args:
            skipped: Whether the step changes nothing.
            divisor: What the optimizer itself divides the gradients by.
        """
        self.note_changes()
        self.window.left_out = False  # the step comes after the update
        weights = self.weights
        overflows = not skipped and self.take_overflow_back()
        self.measure()
        self._keys_at_begin = self.versions()
        self._divisor = divisor
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        halves = [weight for weight in weights if weight.dtype in SIXTEEN_BITS]
        self._weights_before = [(weight, weight.detach().clone()) for weight in halves]
        self._step = {
            "skipped": skipped,
            "again": not self.is_open,
            "overflows": overflows,
            "rates": rates,
            "rate": float((rates or [0])[0] or 0),
            "rounded": self._is_rounded is False and are_rounded(weights),
        }

    @unheard
    def end_step(self, **known: Any) -> None:
        """Note the step.

        Args:
            known: What else is known of the step, for its event.
        """
        window, norm = self.window, self._norm_of_step()
        self._step["again"] &= norm != 0 or self._step["overflows"]
        multiplied = {
            "norm": norm,
            "factor": self.factor / self._divisor,
            "by_hand": window.by_hand,
        }
        known |= {"optimizer": self.number, "lost": _share_lost(self._weights_before)}
        step = self._record.note("step", **multiplied, **self._step, **known)
        if self.is_open or norm:  # the optimizer has gradients
            window.steps.append(step)
        for backward in window.used:
            backward.divided = backward.divided or step.scaled
        weights = [weight for weight in self.weights if weight.requires_grad]
        self._record.weight_dtypes |= {dtype_name(weight.dtype) for weight in weights}
        self._is_rounded = are_rounded(self.weights)
        self._used, self.factor, self.computed_since_step = self.versions(), 1.0, False
        self.overflows = False

    def _norm_of_step(self) -> float:
        """The norm of the gradients that the step used; its hooks may change them."""
        now, before = self.versions(), self.norm / self._divisor
        if now == self._keys_at_begin or not _are_same(now, self._keys_at_begin):
            return before
        self.measure()
        if not self.norm:  # the step has zeroed them
            return before
        self.window.by_hand *= self.norm / before if before else 1.0
        return self.norm


def version_key(weight: torch.Tensor) -> Key:
    """A key that changes with the gradient tensor of a weight and with its values."""
    gradient = weight.grad
    return (0, 0) if gradient is None else (id(gradient), version_of(gradient))


def _write(gradient: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a gradient without changing its version."""
    if gradient.is_sparse:
        gradient.data = values  # `data` of a sparse tensor is a copy
    else:
        gradient.data.copy_(values)


def _is_multiple(now: torch.Tensor, sample: torch.Tensor, ratio: float) -> bool:
    """Whether a sample of gradients is this multiple of an earlier one."""
    is_same_size = len(sample) == len(now)
    return is_same_size and torch.allclose(now, ratio * sample, rtol=0.01)


def _known(factor: float, ratio: float) -> float:
    """What multiplies gradients after a change of their norm by a ratio.

    NaN if they may have been divided by the scale, and clipped.
    """
    return factor if ratio * factor > 1.01 else math.nan


def _numbers_of(gradient: torch.Tensor | None) -> torch.Tensor:
    """The numbers of a gradient, in float32; empty if there is none."""
    if gradient is None:
        return torch.zeros(0)
    return values_of(gradient).float().flatten()


def _are_same(keys: Sequence[Key], others: Sequence[Key]) -> bool:
    """Whether two lists of keys belong to the same tensors, whatever their values."""
    return [gradient for gradient, _ in keys] == [gradient for gradient, _ in others]


# 16-bit weights.


@unheard
def are_rounded(weights: Sequence[torch.Tensor]) -> bool:
    """Whether all float32 weights are exactly numbers of one 16-bit dtype."""
    full = [weight.detach() for weight in weights if weight.dtype is torch.float32]
    for dtype in SIXTEEN_BITS if full else ():
        if all(torch.equal(each, each.to(dtype).float()) for each in full):
            return True
    return False


def _share_lost(halves: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The share of 16-bit weights with a gradient that a step left unchanged.

    Args:
        halves: The weights, each with its values before the step.
    """
    same, pulled = 0, 0
    for weight, before in halves:
        if weight.grad is not None:
            has_gradient = values_of(weight.grad) != 0
            same += int((has_gradient & (weight.detach() == before)).sum())
            pulled += int(has_gradient.sum())
    return same / max(pulled, 1)
