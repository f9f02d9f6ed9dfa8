"""The steps of one optimizer: attempted, applied, norm, headroom and schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from determined_amp.amp.counts import DeviceSum, StepCounts
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.scaler import Skipped
from determined_amp.amp.schedules import RateSchedule
from determined_amp.amp.tensors import gradients_of

# Optimizer steps between two measurements of the largest gradient, which reads all of
# them.
HEADROOM_PERIOD = 10


class OptimizerSteps:
    """The steps of one optimizer.

    Args:
        device: Where its parameters are.
        scaled: Whether its gradients are multiplied by a loss scale, so that steps can
            be skipped.

    Attributes:
        counts: Its steps since the start of the training.
        norm_sum: The sum of its gradient norms since the last report.
        has_norm: Whether a norm was ever measured.
        largest: The largest scaled gradient since the last report, (), on the device; 0
            if there is none.
        applied_before: Applied steps at the last report, (), int64, on the device.
        attempted_before: Attempted steps at the last report.
        schedule: Moves its rate; None if the rate is constant, or moved elsewhere.
    """

    def __init__(self, device: torch.device, *, scaled: bool) -> None:
        self.counts = StepCounts(device, can_skip=scaled)
        # Without a scale no step is skipped: gradients that are not finite reach the
        # weights, or a clip makes all of them 0.
        self.norm_sum = DeviceSum(device, finite_only=scaled)
        self.has_norm = False
        self.largest = torch.zeros((), device=device)
        self.applied_before = torch.zeros((), dtype=torch.int64, device=device)
        self.attempted_before = 0
        self.schedule: RateSchedule | None = None
        self._scaled = scaled
        self._filled_groups = 0

    @property
    def is_scheduled(self) -> bool:
        """Whether its rate follows its applied steps."""
        return self.schedule is not None and self.schedule.by_steps

    def begin(self, optimizer: Optimizer) -> None:
        """Prepare a step. A training may have added a group since the last one, to thaw
        a layer.
        """
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
        """Put the rate of the next step into the optimizer, by the steps applied so
        far.
        """
        if self.schedule is not None:
            self.schedule.place_rate(self.counts)

    def clip(
        self,
        parameters: Sequence[torch.Tensor],
        max_norm: float,
        scale: Callable[[], torch.Tensor],
    ) -> None:
        """Measure the norm of unscaled gradients, and clip them. No synchronisation.

        Args:
            parameters: The optimizer's parameters.
            max_norm: Largest 2-norm of their gradients; infinity only measures it.
            scale: Returns the loss scale, (), on the device.
        """
        self.measure(parameters, scale)
        if max_norm < math.inf and any(
            parameter.grad is not None for parameter in parameters
        ):
            self.add_norm(nn.utils.clip_grad_norm_(parameters, max_norm))
        elif gradients := gradients_of(parameters):
            norms = torch.stack(torch._foreach_norm(gradients))
            self.add_norm(torch.linalg.vector_norm(norms))

    def measure(
        self,
        parameters: Sequence[torch.Tensor],
        scale: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Measure the largest scaled gradient, on every tenth step. No synchronisation.

        Gradients that are not finite are left out: their step is skipped.

        Args:
            parameters: The optimizer's parameters.
            scale: Returns the loss scale, if the gradients are already unscaled.
        """
        if not self._scaled or self.counts.attempted % HEADROOM_PERIOD:
            return
        if gradients := gradients_of(parameters):
            norm = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
            largest = torch.nan_to_num(norm * scale() if scale else norm, posinf=0.0)
            torch.maximum(self.largest, largest, out=self.largest)

    def add_norm(self, norm: torch.Tensor) -> None:
        """Count the norm of one step, (), on the device; left out if its step is
        skipped.
        """
        self.has_norm = True
        self.norm_sum.add(norm)

    def reset(self) -> None:
        """Begin the next report."""
        self.norm_sum.reset()
        self.largest.zero_()
        self.applied_before = self.counts.applied
        self.attempted_before = self.counts.attempted

    def on_device(self) -> tuple[torch.Tensor, ...]:
        """The five tensors, each (), that a report reads."""
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
        optimizers: The optimizers of the training, in order; more may come later.
        scaled: Whether a loss scale multiplies their gradients.

    Attributes:
        first: The steps of the first optimizer, which may not exist yet.
    """

    def __init__(
        self, device: torch.device, optimizers: Sequence[Optimizer], *, scaled: bool
    ) -> None:
        self.first = OptimizerSteps(device, scaled=scaled)
        self._device = device
        self._optimizers = optimizers
        self._scaled = scaled
        self._of: dict[Optimizer, OptimizerSteps] = {}
        self._saved: StateDict = {}

    def of(self, optimizer: Optimizer) -> OptimizerSteps:
        """The steps of one optimizer."""
        steps = self._of.get(optimizer)
        if steps is None:
            is_first = optimizer is next(iter(self._optimizers), optimizer)
            steps = (
                self.first
                if is_first
                else OptimizerSteps(self._device, scaled=self._scaled)
            )
            self._of[optimizer] = steps
        return steps

    def all(self) -> list[OptimizerSteps]:
        """The steps of every optimizer, in the order of the training's optimizers."""
        return [self.of(optimizer) for optimizer in self._optimizers]

    def schedules(self) -> list[RateSchedule]:
        """The schedules that `wrap_lr_scheduler` was given."""
        schedules = (steps.schedule for steps in self.all())
        return [schedule for schedule in schedules if schedule is not None]

    def state_dict(self) -> StateDict:
        """Counts and schedules as plain numbers; synchronises."""
        every = self.all()
        return {
            "optimizers": [steps.counts.state_dict() for steps in every],
            # Only a plateau has a state of its own.
            "plateaus": [
                steps.schedule and steps.schedule.state_dict() for steps in every
            ],
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state; an optimizer that is still to come gets its part
        later.
        """
        self._saved = state_dict
        for optimizer in self._optimizers:
            self.restore(optimizer)
            self.restore_schedule(optimizer)

    def restore(self, optimizer: Optimizer) -> None:
        """Give an optimizer its part of the loaded state."""
        number, saved = (
            self._optimizers.index(optimizer),
            self._saved.get("optimizers", ()),
        )
        if number < len(saved):
            steps = self.of(optimizer)
            steps.counts.load_state_dict(saved[number])
            steps.place_rate()
            steps.reset()

    def restore_schedule(self, optimizer: Optimizer) -> None:
        """Give the schedule of an optimizer its part of the loaded state."""
        number, saved = (
            self._optimizers.index(optimizer),
            self._saved.get("plateaus", ()),
        )
        schedule = self.of(optimizer).schedule
        if number < len(saved) and saved[number] and schedule is not None:
            schedule.load_state_dict(saved[number])


def fill_momentum(optimizer: Optimizer, *, can_skip: bool) -> None:
    """Give a fused SGD momentum buffers of zeros before the first step of a parameter.

    By itself it allocates them uninitialised and fills them in its first step. If that
    step is skipped, the second one adds garbage to the weights. It also raises an error
    if some parameters of a group get their first gradient later than others.

    Args:
        optimizer: Any optimizer; only a fused SGD is changed.
        can_skip: Whether there is a loss scale.

    Raises:
        ConfigError: if steps can be skipped and it has dampening, for which zeros would
            be wrong.
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
                "SGD",
                [
                    f"got fused and dampening {group['dampening']:g}, which goes wrong "
                    "when the first step overflows; allowed: dampening 0, or "
                    "fused=False"
                ],
            )
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


class StepHook:
    """Calls a function before each step of an optimizer that has no hooks of torch.

    Many wrappers are like that: their class never calls `Optimizer.__init__`, or is no
    `Optimizer`.

    Args:
        optimizer: The optimizer.
        before: Called with the optimizer and the arguments of the step.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[..., None]) -> None:
        step = optimizer.step

        @wraps(step)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            before(optimizer, args, kwargs)
            return step(*args, **kwargs)

        self._patches = ExitStack()
        self._patches.enter_context(patched(optimizer, "step", hooked))

    def remove(self) -> None:
        """Call it no more."""
        self._patches.close()
