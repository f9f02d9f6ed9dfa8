"""The steps of one optimizer: attempted, applied, norm, headroom and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.optim import SGD, Optimizer

from determined_amp.amp.device_sum import DeviceSum
from determined_amp.amp.fields import ConfigError
from determined_amp.amp.scaler import Skipped
from determined_amp.amp.schedules import AppliedStepSchedule, PlateauSchedule

# Optimizer steps between two measurements of the largest gradient, which reads all of them.
HEADROOM_PERIOD = 10


class OptimizerSteps:
    """What is known of the steps of one optimizer.

    Args:
        device: Where its parameters are.
        scaled: Whether a loss scale has multiplied its gradients, and so can skip its steps.

    Attributes:
        counts: Its steps since the start of the training.
        norm_sum: The sum of the norms of its gradients since the last report.
        has_norm: Whether a norm was ever measured.
        largest: The largest scaled gradient since the last report, (), on the device; 0 without.
        applied_before: Applied steps at the last report, (), int64, on the device.
        attempted_before: Attempted steps at the last report.
        schedule: Moves its rate; None for a constant one, or one that others move.
    """

    def __init__(self, device: torch.device, *, scaled: bool) -> None:
        self.counts = StepCounts(device, can_skip=scaled)
        self.norm_sum = DeviceSum(device, finite_only=True)
        self.has_norm = False
        self.largest = torch.zeros((), device=device)
        self.applied_before = torch.zeros((), dtype=torch.int64, device=device)
        self.attempted_before = 0
        self.schedule: AppliedStepSchedule | PlateauSchedule | None = None
        self._scaled = scaled
        self._filled_groups = 0

    @property
    def is_scheduled(self) -> bool:
        """Whether its rate follows its applied steps."""
        return isinstance(self.schedule, AppliedStepSchedule)

    def begin(self, optimizer: Optimizer) -> None:
        """Called before every step: a training may add a group when it thaws a layer."""
        if self._filled_groups != len(optimizer.param_groups):
            if not self._filled_groups:
                self.place_rate()
            self._filled_groups = len(optimizer.param_groups)
            fill_momentum(optimizer, can_skip=self._scaled)

    def finish(self, skipped: Skipped) -> None:
        """Count a step, and move the schedule if it was applied. No synchronisation."""
        self.counts.count(skipped)
        self.place_rate()

    def place_rate(self) -> None:
        """Put the rate of the next step into the optimizer, by the steps applied so far."""
        schedule, counts = self.schedule, self.counts
        if isinstance(schedule, AppliedStepSchedule):
            known = None if schedule.on_device else counts.applied_on_host
            schedule.move(counts.attempted, counts.applied if known is None else known)

    def measure(
        self,
        parameters: Sequence[torch.Tensor],
        scale: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Measure the largest scaled gradient, on every tenth step. No synchronisation.

        Gradients that are not finite are left out: their step is skipped.

        Args:
            parameters: Those of the optimizer.
            scale: Gives the loss scale, if their gradients are unscaled already.
        """
        if not self._scaled or self.counts.attempted % HEADROOM_PERIOD:
            return
        gradients = gradients_of(parameters)
        if not gradients:
            return
        norm = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
        largest = torch.nan_to_num(norm * scale() if scale else norm, nan=0.0, posinf=0.0)
        torch.maximum(self.largest, largest, out=self.largest)

    def add_norm(self, norm: torch.Tensor) -> None:
        """Count the norm of one step, (), on the device; ignored if not finite."""
        self.has_norm = True
        self.norm_sum.add(norm)

    def reset(self) -> None:
        """Begin the next report."""
        self.norm_sum.reset()
        self.largest.zero_()
        self.applied_before.copy_(self.counts.applied)
        self.attempted_before = self.counts.attempted

    def on_device(self) -> tuple[torch.Tensor, ...]:
        """Five numbers, (), that a report reads."""
        counts = self.counts
        return (
            self.norm_sum.total(),
            self.largest,
            counts.applied,
            self.applied_before,
            counts.consecutive_skips(),
        )


class StepsOfEach:
    """The steps of every optimizer of a training.

    Args:
        device: Where their parameters are.
        optimizers: Those of the training, in their order; more may come later.
        scaled: Whether a loss scale multiplies their gradients.

    Attributes:
        first: Those of the optimizer that comes first, before it is there.
    """

    def __init__(
        self, device: torch.device, optimizers: Sequence[Optimizer], *, scaled: bool
    ) -> None:
        self.first = OptimizerSteps(device, scaled=scaled)
        self._device = device
        self._optimizers = optimizers
        self._scaled = scaled
        self._of: dict[Optimizer, OptimizerSteps] = {}

    def of(self, optimizer: Optimizer) -> OptimizerSteps:
        """The steps of one optimizer."""
        steps = self._of.get(optimizer)
        if steps is None:
            is_first = optimizer is next(iter(self._optimizers), optimizer)
            steps = self.first if is_first else OptimizerSteps(self._device, scaled=self._scaled)
            self._of[optimizer] = steps
        return steps

    def all(self) -> list[OptimizerSteps]:
        """The steps of every optimizer, in the order of the training's optimizers."""
        return [self.of(optimizer) for optimizer in self._optimizers]


class StepCounts:
    """How many steps of one optimizer were attempted, and how many of them were applied.

    Outcomes are buffered and summed when a count is read, or every 64 steps: counting a single step
    costs the host three kernels.

    Args:
        device: Where its parameters are.
        can_skip: Whether a loss scale is there to skip a step; without one all are applied.

    Attributes:
        attempted: Steps applied or skipped so far.
        applied_on_host: Applied ones, while the host knows of every step whether it was skipped;
            None after a step that only the device knows about.
    """

    _HANDFUL = 64

    def __init__(self, device: torch.device, *, can_skip: bool) -> None:
        self.attempted = 0
        self.applied_on_host: int | None = 0
        self._last_applied_on_host = 0
        self._applied = torch.zeros((), dtype=torch.int64, device=device)
        self._last_step_applied = torch.tensor(not can_skip, device=device)
        self._last_applied = torch.zeros((), dtype=torch.int64, device=device)
        self._found: list[torch.Tensor] = []  # of the newest steps, which are not counted yet
        self._settled = True

    def count(self, skipped: bool | torch.Tensor) -> None:
        """Count a step. No synchronisation.

        Args:
            skipped: What `GradScaler` found, (), not 0 for a skipped step, which nobody may change
                any more; or a bool where the host knows.
        """
        if isinstance(skipped, torch.Tensor) and self.applied_on_host is not None:
            self._settle()
            self.applied_on_host = None
        if self.applied_on_host is None and not isinstance(skipped, torch.Tensor):
            skipped = torch.full((), float(skipped), device=self._applied.device)
        self.attempted += 1
        self._settled = False
        if isinstance(skipped, torch.Tensor):
            self._found.append(skipped)
            if len(self._found) == self._HANDFUL:
                self._settle()
        elif not skipped:
            assert self.applied_on_host is not None
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

        What must stand still on a skipped step, such as an average of the weights, can be gated by
        it without a synchronisation.
        """
        self._settle()
        return self._last_step_applied

    def consecutive_skips(self) -> torch.Tensor:
        """Steps skipped since the last applied one, (), int64, on the device."""
        self._settle()
        return self.attempted - self._last_applied

    def state_dict(self) -> dict[str, int]:
        """Plain numbers; synchronises."""
        return {
            "attempted": self.attempted,
            "applied": int(self.applied),
            "last_applied": self.attempted - int(self.consecutive_skips()),
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """What `state_dict` gave."""
        self.attempted = state["attempted"]
        self.applied_on_host = state["applied"]
        self._last_applied_on_host = state["last_applied"]
        self._found.clear()
        self._applied.fill_(state["applied"])
        self._last_applied.fill_(state["last_applied"])
        self._settled = True

    def _settle(self) -> None:
        """Bring the tensors up to date. No synchronisation."""
        if self._settled:
            return
        self._settled = True
        if self.applied_on_host is not None:
            self._applied.fill_(self.applied_on_host)
            self._last_applied.fill_(self._last_applied_on_host)
            self._last_step_applied.fill_(self._last_applied_on_host == self.attempted)
        elif len(self._found) == 1:
            torch.logical_not(self._found[0], out=self._last_step_applied)
            self._last_applied.masked_fill_(self._last_step_applied, self.attempted)
            self._applied.add_(self._last_step_applied)
        else:
            applied = torch.stack(self._found) == 0
            first = self.attempted - len(self._found) + 1
            steps = torch.arange(first, self.attempted + 1, device=applied.device)
            torch.maximum(self._last_applied, (steps * applied).max(), out=self._last_applied)
            self._last_step_applied.copy_(applied[-1])
            self._applied.add_(applied.sum())
        self._found.clear()


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The dense gradients of those that have one."""
    gradients = (parameter.grad for parameter in parameters)
    return [g for g in gradients if g is not None and not g.is_sparse]


def fill_momentum(optimizer: torch.optim.Optimizer, *, can_skip: bool) -> None:
    """Give a fused SGD momentum buffers of zeros before the first step of a parameter.

    It would allocate them uninitialised and fill them in its first step. If that step is skipped,
    the second one adds the garbage to the weights. And it raises if some parameters of a group get
    their first gradient later than others.

    Args:
        optimizer: Any; others are left alone.
        can_skip: Whether there is a loss scale.

    Raises:
        ConfigError: if it has dampening, with which zeros are not the same, and can skip steps.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if not (group.get("fused") and group["momentum"]):
            continue
        if group["dampening"]:
            if not can_skip:
                continue
            raise ConfigError(
                "the trial",
                [
                    f"SGD: got fused and dampening {group['dampening']:g}, which goes wrong when "
                    "the first step overflows; allowed: dampening 0, or fused=False"
                ],
            )
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
