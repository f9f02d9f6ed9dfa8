"""Sums and counts on the device that cost the host little.

Adding one number to a tensor costs the host several kernel launches. Keeping it in a
list costs nothing. So numbers are kept, and added up 64 at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# How many numbers are kept before they are added up.
_HANDFUL = 64


class DeviceSum:
    """A float64 sum of many small device tensors.

    Args:
        device: The device of the sum.
        finite_only: Whether to leave out numbers that are not finite.
    """

    def __init__(self, device: torch.device, *, finite_only: bool = False) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._finite_only = finite_only
        self._waiting: list[torch.Tensor] = []
        self._weight = 1

    def add(self, value: torch.Tensor, weight: int = 1) -> None:
        """Add a tensor, (), `weight` times. It must not change afterwards.

        No synchronisation.
        """
        if weight != self._weight or len(self._waiting) == _HANDFUL:
            self.total()
            self._weight = weight
        self._waiting.append(value)

    def total(self) -> torch.Tensor:
        """The sum, (), float64, on the device. No synchronisation."""
        if self._waiting:
            values = torch.stack(self._waiting).double()
            if self._finite_only:
                values = torch.nan_to_num(values, posinf=0.0)
            self._sum.add_(values.sum(), alpha=self._weight)
            self._waiting.clear()
        return self._sum

    def reset(self) -> None:
        self._waiting.clear()
        self._sum.zero_()


class LeftOutBatches:
    """Counts the batches that a training leaves out.

    Such a batch has a loss that is not finite, and no step uses its gradients. If the
    batch ends without a step, its gradients may still wait for the step of a later
    batch. That shows when the next loss is scaled: gradients that were not zeroed wait.

    Nothing here waits for the device.

    Args:
        device: Where the losses are.

    Attributes:
        count: How many batches were left out since the last report.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = DeviceSum(device)
        self._has_gradients = False  # of a loss that no step has used
        self._has_stepped = False
        # Whether the last batch was counted, if its gradients may wait.
        self._counted: torch.Tensor | None = None

    def begin_backward(self, gradients: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Do not count the last batch if its gradients wait.

        Args:
            gradients: Returns the gradients of the training as they are now.
        """
        self._has_gradients = True
        if self._counted is not None:
            for gradient in gradients()[-1:]:
                waits = gradient.any().to(self._counted.device)
                self.count.add(-self._counted * waits)
            self._counted = None

    def step(self) -> None:
        """Record that a step has used the gradients so far."""
        self._has_stepped = True

    def end_batch(self, loss: torch.Tensor | None) -> None:
        """Count the batch if it is left out, as far as one can know.

        Args:
            loss: Its loss, (), on the device; None if unknown.
        """
        if loss is not None and not self._has_stepped:
            counted = (~torch.isfinite(loss)).float()
            self.count.add(counted)
            if self._has_gradients:
                self._counted = counted
        self._has_stepped = self._has_gradients = False


class StepCounts:
    """How many steps of one optimizer were attempted, and how many were applied.

    While the host knows the outcome of every step, the counts are Python numbers.
    Outcomes that only the device knows are kept, and added up there when a count is
    read or after 64 steps.

    Args:
        device: The device of the optimizer's parameters.
        can_skip: Whether there is a loss scale. Without one every step is applied.

    Attributes:
        attempted: Steps so far, applied and skipped.
        began: Applied and skipped steps before this run, from the checkpoint.
    """

    def __init__(self, device: torch.device, *, can_skip: bool) -> None:
        self.attempted = 0
        self.began = 0, 0
        self._device = device
        self._can_skip = can_skip
        self._applied: int | torch.Tensor = 0
        # The number of the last applied step among the attempted ones, from 1.
        self._last_applied: int | torch.Tensor = 0
        # `found_inf` of each step that is not in `_applied` yet.
        self._outcomes: list[torch.Tensor] = []

    def count(self, skipped: bool | torch.Tensor) -> None:
        """Count a step. No synchronisation.

        Args:
            skipped: A bool if the host knows the outcome, else `found_inf` of
                `GradScaler`, (), not 0 for a skipped step. It must not change
                afterwards.
        """
        if isinstance(skipped, torch.Tensor):
            self.attempted += 1
            self._outcomes.append(skipped)
            if len(self._outcomes) == _HANDFUL:
                self._settle()
            return
        if self._outcomes:
            self._settle()
        self.attempted += 1
        if not skipped:
            self._applied = self._applied + 1
            self._last_applied = self.attempted

    @property
    def applied_on_host(self) -> int | None:
        """Steps applied so far; None if only the device knows."""
        is_known = isinstance(self._applied, int) and not self._outcomes
        return int(self._applied) if is_known else None

    @property
    def applied(self) -> torch.Tensor:
        """Steps applied so far, (), int64, on the device.

        Read it again after every step.
        """
        self._settle()
        return self._on_device(self._applied)

    @property
    def last_step_applied(self) -> torch.Tensor:
        """Whether the newest step was applied, (), bool, on the device.

        Read it again after every step. It can gate what must not move on a skipped
        step, such as an average of the weights, without a synchronisation.
        """
        self._settle()
        if not self.attempted:
            return self._on_device(not self._can_skip)
        return self._on_device(self._last_applied == self.attempted)

    def consecutive_skips(self) -> torch.Tensor:
        """Steps skipped since the last applied one, (), int64, on the device."""
        self._settle()
        return self._on_device(self.attempted - self._last_applied)

    def state_dict(self) -> dict[str, int]:
        """The counts as plain numbers; synchronises."""
        self._settle()
        return {
            "attempted": self.attempted,
            "applied": int(self._applied),
            "last_applied": int(self._last_applied),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from what `state_dict` returned."""
        self.attempted = state["attempted"]
        self._applied = state["applied"]
        self.began = state["applied"], state["attempted"] - state["applied"]
        self._last_applied = state["last_applied"]
        self._outcomes.clear()

    def _settle(self) -> None:
        """Add the kept outcomes to the counts. No synchronisation."""
        if not self._outcomes:
            return
        last = self._on_device(self._last_applied)
        if len(self._outcomes) == 1:
            newly = applied = self._outcomes[0] == 0
            self._last_applied = last.masked_fill_(applied, self.attempted)
        else:
            applied = torch.stack(self._outcomes) == 0
            first = self.attempted - len(self._outcomes) + 1
            steps = torch.arange(first, self.attempted + 1, device=applied.device)
            self._last_applied = torch.maximum(last, (steps * applied).max())
            newly = applied.sum()
        self._applied = self._applied + newly
        self._outcomes.clear()

    def _on_device(self, value: int | torch.Tensor) -> torch.Tensor:
        return (
            value
            if isinstance(value, torch.Tensor)
            else torch.full((), value, device=self._device)
        )
