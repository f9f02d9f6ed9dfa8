"""Sums and counts on the device that cost the host little.

To add one number to a tensor costs the host several kernels, to keep it in a list costs nothing. So
the numbers are kept, and 64 of them are added up at once.
"""

from __future__ import annotations

import torch


class DeviceSum:
    """A float64 sum of many small device tensors.

    Args:
        device: Where the sum is.
        finite_only: Leave out what is not finite.
    """

    _HANDFUL = 64

    def __init__(self, device: torch.device, *, finite_only: bool = False) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._finite_only = finite_only
        self._waiting: list[torch.Tensor] = []
        self._weight = 1

    def add(self, value: torch.Tensor, weight: int = 1) -> None:
        """Add a tensor, (), `weight` times; it must not change later. No synchronisation."""
        if weight != self._weight or len(self._waiting) == self._HANDFUL:
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


class StepCounts:
    """How many steps of one optimizer were attempted, and how many of them were applied.

    As long as the host knows whether each step was skipped, it counts by itself. After the first
    step that only the device knows about, the outcomes are kept, and summed up when a count is read
    or after 64 steps.

    Args:
        device: The device of its parameters.
        can_skip: Whether there is a loss scale; without one every step is applied.

    Attributes:
        attempted: Steps applied or skipped so far.
        applied_on_host: Steps applied so far; None after a step that only the device knows about.
    """

    _HANDFUL = 64

    def __init__(self, device: torch.device, *, can_skip: bool) -> None:
        self.attempted = 0
        self.applied_on_host: int | None = 0
        self._last_applied_on_host = 0
        self._can_skip = can_skip
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        self._last_applied = torch.zeros((), dtype=torch.int64, device=device)
        self._last_step_applied = torch.zeros((), dtype=torch.bool, device=device)
        self._outcomes: list[torch.Tensor] = []  # of steps that the device has not counted yet

    def count(self, skipped: bool | torch.Tensor) -> None:
        """Count a step. No synchronisation.

        Args:
            skipped: `found_inf` of `GradScaler`, (), not 0 for a skipped step, which must not
                change later; or a bool if the host knows.
        """
        if isinstance(skipped, torch.Tensor) and self.applied_on_host is not None:
            if self.attempted:
                self._settle()
            self.applied_on_host = None
        self.attempted += 1
        if self.applied_on_host is None:
            if not isinstance(skipped, torch.Tensor):
                skipped = torch.full((), float(skipped), device=self._applied.device)
            self._outcomes.append(skipped)
            if len(self._outcomes) == self._HANDFUL:
                self._settle()
        elif not skipped:
            self.applied_on_host += 1
            self._last_applied_on_host = self.attempted

    @property
    def applied(self) -> torch.Tensor:
        """Steps applied so far, (), int64, on the device; ask after every step."""
        self._settle()
        return self._applied

    @property
    def last_step_applied(self) -> torch.Tensor:
        """Whether the newest step was applied, (), bool, on the device; ask after every step.

        It can gate, without a synchronisation, what must not move on a skipped step, such as an
        average of the weights.
        """
        self._settle()
        return self._last_step_applied

    def consecutive_skips(self) -> torch.Tensor:
        """Steps skipped since the last applied one, (), int64, on the device."""
        self._settle()
        return self.attempted - self._last_applied

    def state_dict(self) -> dict[str, int]:
        """The counts as plain numbers; synchronises."""
        return {
            "attempted": self.attempted,
            "applied": int(self.applied),
            "last_applied": self.attempted - int(self.consecutive_skips()),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from what `state_dict` returned."""
        self.attempted = state["attempted"]
        self.applied_on_host = state["applied"]
        self._last_applied_on_host = state["last_applied"]
        self._settle()

    def _settle(self) -> None:
        """Bring the tensors up to date. No synchronisation."""
        if self.applied_on_host is not None:
            is_applied = self._last_applied_on_host == self.attempted
            self._applied.fill_(self.applied_on_host)
            self._last_applied.fill_(self._last_applied_on_host)
            self._last_step_applied.fill_(is_applied and (self.attempted > 0 or not self._can_skip))
        elif len(self._outcomes) == 1:
            torch.logical_not(self._outcomes[0], out=self._last_step_applied)
            self._last_applied.masked_fill_(self._last_step_applied, self.attempted)
            self._applied.add_(self._last_step_applied)
        elif self._outcomes:
            applied = torch.stack(self._outcomes) == 0
            first = self.attempted - len(self._outcomes) + 1
            steps = torch.arange(first, self.attempted + 1, device=applied.device)
            torch.maximum(self._last_applied, (steps * applied).max(), out=self._last_applied)
            self._last_step_applied.copy_(applied[-1])
            self._applied.add_(applied.sum())
        self._outcomes.clear()
