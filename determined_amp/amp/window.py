"""What happens to an optimizer's gradients from one step to the next."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from determined_amp.amp.counts import DeviceSum, StepCounts
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.mistakes import (
    IN_A_LOOP,
    MAY_BE_SCALED,
    TRANSITIONS,
    Call,
    Mistake,
    Stage,
    Wording,
)
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.schedules import RateSchedule
from determined_amp.amp.torch_private import version_of

# Optimizer steps between two measurements of the largest gradient. Each measurement
# reads all gradients.
HEADROOM_PERIOD = 10

# Whether a step was skipped: a bool where the host knows, else `found_inf`, (),
# float32, on the device, not 0 for a skipped step.
Skipped = bool | torch.Tensor


class Window:
    """What has happened to one optimizer's gradients since its last step.

    `move` changes the stage by the table of `mistakes.py`, in every precision, and
    refuses mistakes. Nothing else changes the stage:

            backward of a scaled loss
                   |
                   v     unscale              drop
        +-----> SCALED ---------> UNSCALED ----------> DROPPED
        |          |                 |
        |          | step            | step
        |          v                 |
        |       STEPPED <------------+
        |          | update
        |          v
        +------ UPDATED
          count

    For the gradients of the next backward, DROPPED is the same as SCALED. The
    gradients of an unmodified trial are unscaled right before their step, so it drops
    from SCALED. `update` takes both UNSCALED and DROPPED to SCALED, because those
    gradients made no step. Their norm does not count, but an overflow in them lowers
    the scale.

    Nothing in a window waits for the device.

    Args:
        optimizer: The optimizer.
        counts: Its steps since the start of the training.
        device: Where the parameters are.
        scaled: Whether a loss scale multiplies the gradients, so that steps can be
            skipped.
        words: What error messages say.

    Attributes:
        optimizer: See above.
        stage: The current stage in the diagram.
        skipped: Whether the newest step was skipped, until it is counted.
        found_inf: Whether a backward overflowed, (), float32, on the device; None if
            only the scaler checks, or nothing was checked yet.
        gradients_used: Whether a step has used the gradients since the last backward.
            Only unmodified trials read this and `found_inf`.
        counts: See above.
        norm_sum: The sum of the gradient norms since the last report.
        norms: Number of norms in `norm_sum`, those of skipped steps included.
        largest: The largest scaled gradient since the last report, (), on the device; 0
            if there was none.
        applied_before: Applied steps at the last report, (), int64, on the device.
        attempted_before: Attempted steps at the last report.
        schedule: Moves the learning rate; None if nothing or other code moves it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        counts: StepCounts,
        device: torch.device,
        *,
        scaled: bool,
        words: Wording = IN_A_LOOP,
    ) -> None:
        self.optimizer = optimizer
        self.stage = Stage.SCALED
        self.skipped: Skipped = False
        self.found_inf: torch.Tensor | None = None
        self.gradients_used = False
        self._versions: list[int | None] = []  # of the gradients after a backward
        self.counts = counts
        # Without a scale no step is skipped, so a norm that is not finite belongs to an
        # applied step and must show.
        self.norm_sum = DeviceSum(device, finite_only=scaled)
        self.norms = 0
        self._norm: torch.Tensor | None = None  # of the next step, until it is counted
        self.largest = torch.zeros((), device=device)
        self.applied_before = torch.zeros((), dtype=torch.int64, device=device)
        self.attempted_before = 0
        self.schedule: RateSchedule | None = None
        self._scaled = scaled
        self._words = words
        self._prepared_groups = 0

    @property
    def is_scheduled(self) -> bool:
        """Whether the learning rate follows the applied steps."""
        return self.schedule is not None and self.schedule.by_steps

    # From step to step.

    def move(self, call: Call) -> None:
        """Go to the stage that a call leads to.

        Raises:
            ConfigError: if the call is a mistake in this stage.
        """
        after = TRANSITIONS[self.stage].get(call, self.stage)
        if isinstance(after, Mistake):
            raise self._words.error_of(after)
        self.stage = after
        if after in MAY_BE_SCALED:
            self._norm = None

    def has_gradient(self) -> bool:
        """Whether a parameter of the optimizer has a gradient."""
        # every step asks, so the first gradient ends the loop
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return True
        return False

    def begin_backward(self) -> None:
        """Reset `found_inf` if a step has used the gradients, or they are gone."""
        if self.gradients_used or not self.has_gradient():
            self.found_inf, self.gradients_used = None, False

    def note_backward(self, found_inf: torch.Tensor) -> None:
        """Add the outcome of a backward to `found_inf`, (), float32, on the device."""
        before = found_inf if self.found_inf is None else self.found_inf
        self.found_inf = torch.maximum(before, found_inf)
        self._versions = self._versions_now()

    def has_other_gradients(self) -> bool:
        """Whether gradients were changed or dropped since the last backward."""
        return self._versions != self._versions_now()

    def _versions_now(self) -> list[int | None]:
        gradients = (parameter.grad for parameter in self.parameters())
        return [None if each is None else version_of(each) for each in gradients]

    def drop(self) -> None:
        """Record that unscaled gradients were dropped without a step."""
        self.move("drop")
        self.found_inf = None

    def prepare(self) -> None:
        """Prepare the first step, or the first one with a new parameter group.

        A training may add a group to thaw a layer.
        """
        if not self._prepared_groups:
            self.place_rate()
        fill_momentum(self.optimizer, can_skip=self._scaled)
        if not any(map(is_lazy, self.parameters())):
            self._prepared_groups = len(self.optimizer.param_groups)

    def begin_step(self) -> None:
        """Begin a step. It counts as skipped unless torch then calls the optimizer.

        Raises:
            ConfigError: if a step is a mistake in this stage.
        """
        self.move("begin_step")
        self.skipped, self.gradients_used = True, True

    def see_step(self, optimizer: Optimizer) -> None:
        """Record that torch calls `step` of the optimizer, or of one inside it.

        A fused optimizer is called even for a skip, because it reads `found_inf`
        itself.
        """
        if self._prepared_groups != len(self.optimizer.param_groups):
            self.prepare()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            self.skipped = found_inf
        elif self.skipped is True:
            self.skipped = False

    def count(self) -> None:
        """Count the newest step, and move the schedule if it was applied.

        No synchronisation.
        """
        norm = self._norm
        self.move("count")
        if norm is not None:
            self.norm_sum.add(norm)
            self.norms += 1
        self.counts.count(self.skipped)
        if self.schedule is not None:
            self.schedule.place_rate(self.counts)

    def place_rate(self) -> None:
        """Set the optimizer's rate for the next step, by the steps applied so far."""
        if self.schedule is not None:
            self.schedule.place_rate(self.counts)

    # What is measured.

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizer."""
        groups = self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def clip(
        self,
        parameters: Sequence[torch.Tensor] | None,
        max_norm: float,
        scale: Callable[[], torch.Tensor],
    ) -> None:
        """Measure the norm of unscaled gradients, and clip them. No synchronisation.

        Args:
            parameters: The parameters whose gradients are clipped; by default all of
                the optimizer.
            max_norm: Largest 2-norm of their gradients; infinity only measures it.
            scale: Returns the loss scale, (), on the device.
        """
        parameters = self.parameters() if parameters is None else parameters
        self.measure(parameters, scale)
        if max_norm < math.inf and any(
            parameter.grad is not None for parameter in parameters
        ):
            self.add_norm(nn.utils.clip_grad_norm_(parameters, max_norm))
        elif gradients := gradients_of(parameters):
            norms = torch.stack(torch._foreach_norm(gradients))
            self.add_norm(torch.linalg.vector_norm(norms))

    def measure(
        self, parameters: Sequence[torch.Tensor], scale: Callable[[], torch.Tensor]
    ) -> None:
        """Measure the largest scaled gradient, on every tenth step. No synchronisation.

        A gradient that is not finite does not count, because its step is skipped.
        """
        if not self._scaled or self.counts.attempted % HEADROOM_PERIOD:
            return
        if gradients := gradients_of(parameters):
            norm = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
            largest = torch.nan_to_num(norm * scale(), posinf=0.0)
            torch.maximum(self.largest, largest, out=self.largest)

    def add_norm(self, norm: torch.Tensor) -> None:
        """Keep the norm of the next step, (), on the device, for its count.

        Only the first norm is kept: a second clip measures what the first has left.
        """
        if self._norm is None:
            self._norm = norm

    def begin_report(self) -> None:
        """Reset the sums for the next report."""
        self.norm_sum.reset()
        self.norms = 0
        self.largest.zero_()
        self.applied_before = self.counts.applied
        self.attempted_before = self.counts.attempted

    def report_tensors(self) -> tuple[torch.Tensor, ...]:
        """The five tensors, each (), that a report reads."""
        counts = self.counts
        return (
            self.norm_sum.total(),
            self.largest,
            counts.applied,
            self.applied_before,
            counts.consecutive_skips(),
        )


class _Running(threading.local):
    """The window whose step runs in this thread; None between steps.

    An optimizer that steps at any other time may use gradients that are still scaled.

    Attributes:
        window: See above.
        in_threads: The windows whose steps run in any thread, because an optimizer may
            hand its step to other threads.
    """

    window: Window | None = None
    in_threads: ClassVar[list[Window]] = []


RUNNING = _Running()


class Windows(dict[Optimizer, Window]):
    """The window of each optimizer, made when the optimizer is first looked up.

    Args:
        device: Where their parameters are.
        optimizers: The optimizers of the training, in order; more may come later.
        scaled: Whether a loss scale multiplies their gradients.
        meet: A weak reference to what is called with an optimizer before its window is
            made, and may refuse it. A strong one would keep a training alive until
            Python collects garbage, and a training that nobody uses must not refuse
            steps.
        words: What error messages say.

    Attributes:
        device: See above.
        words: See above.
        first_counts: The steps of the first optimizer, which may not exist yet.
    """

    def __init__(
        self,
        device: torch.device,
        optimizers: Sequence[Optimizer] = (),
        *,
        scaled: bool,
        meet: Callable[[], Callable[[Optimizer], object] | None] = lambda: None,
        words: Wording = IN_A_LOOP,
    ) -> None:
        super().__init__()
        self.optimizers = optimizers
        self.device = device
        self.words = words
        self._scaled = scaled
        self._meet = meet
        self._saved: StateDict = {}
        self.first_counts = StepCounts(device, can_skip=scaled)

    def __missing__(self, optimizer: Optimizer) -> Window:
        meet = self._meet()
        if meet is not None:
            meet(optimizer)
        is_first = optimizer is next(iter(self.optimizers), None)
        own_counts = StepCounts(self.device, can_skip=self._scaled)
        window = self[optimizer] = Window(
            optimizer,
            self.first_counts if is_first else own_counts,
            self.device,
            scaled=self._scaled,
            words=self.words,
        )
        self._restore(optimizer)
        return window

    def all(self) -> list[Window]:
        """The window of every optimizer, in the order of the training's optimizers."""
        return [self[optimizer] for optimizer in self.optimizers]

    def suffix(self, optimizer: Optimizer) -> str:
        """The ending of an optimizer's metric names; empty if there is only one."""
        several = len(self.optimizers) > 1
        return f"_{self.optimizers.index(optimizer)}" if several else ""

    def schedules(self) -> list[RateSchedule]:
        """The schedules that `wrap_lr_scheduler` was given."""
        schedules = (window.schedule for window in self.all())
        return [schedule for schedule in schedules if schedule is not None]

    def state_dict(self) -> StateDict:
        """Counts and schedules as plain numbers; synchronises."""
        every = self.all()
        schedules = [window.schedule for window in every]
        counts = [window.counts.state_dict() for window in every]
        # Only a `PlateauSchedule` has a state that moves.
        plateaus = [schedule and schedule.state_dict() for schedule in schedules]
        state: StateDict = {"optimizers": counts, "plateaus": plateaus}
        for part, of_each in state.items():  # a loaded optimizer may not be known yet
            of_each.extend(self._saved.get(part, ())[len(every) :])
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state, also for optimizers that come later."""
        self._saved = state_dict
        for counts in state_dict.get("optimizers", ())[:1]:
            self.first_counts.load_state_dict(counts)
        for optimizer in self.optimizers:
            self._restore(optimizer)
            self.restore_schedule(optimizer)

    def _restore(self, optimizer: Optimizer) -> None:
        counts = self._saved_of(optimizer, "optimizers")
        if counts is not None:
            window = self[optimizer]
            window.counts.load_state_dict(counts)
            window.place_rate()
            window.begin_report()

    def restore_schedule(self, optimizer: Optimizer) -> None:
        """Give the schedule of an optimizer its part of the loaded state."""
        state = self._saved_of(optimizer, "plateaus")
        schedule = self[optimizer].schedule
        if state and schedule is not None:
            schedule.load_state_dict(state)

    def _saved_of(self, optimizer: Optimizer, part: str) -> StateDict | None:
        saved: Sequence[StateDict | None] = self._saved.get(part, ())
        return dict(zip(self.optimizers, saved, strict=False)).get(optimizer)


def fill_momentum(optimizer: Optimizer, *, can_skip: bool) -> None:
    """Give a fused SGD momentum buffers of zeros before the first step of a parameter.

    Otherwise SGD allocates them uninitialised and fills them in its first step. If that
    step is skipped, the second one adds garbage to the weights. SGD also raises an
    error if some parameters of a group get their first gradient later than others.

    Args:
        optimizer: Any optimizer; only a fused SGD is changed.
        can_skip: Whether there is a loss scale.

    Raises:
        ConfigError: if steps can be skipped and the optimizer has dampening, for which
            zeros would be wrong.
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
        # A lazy module learns its sizes in its first forward, which may come later.
        for parameter in (each for each in group["params"] if not is_lazy(each)):
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The numbers of the gradients of parameters, without empty ones, which have no
    maximum.
    """
    gradients = (parameter.grad for parameter in parameters)
    numbers = (
        gradient.coalesce().values() if gradient.is_sparse else gradient
        for gradient in gradients
        if gradient is not None
    )
    return [each for each in numbers if each.numel()]
