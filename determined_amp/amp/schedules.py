"""Learning-rate schedules that move with the optimizer steps that were applied, not
attempted.

A step that GradScaler skips leaves the weights alone, so the schedule must not move
either. Asking on the host whether a step was skipped costs a device synchronisation,
and torch's schedulers count on the host. Here the scheduler runs ahead of the training,
on its own copy of the groups' values. Its rates are a table on the device, indexed by
the count of applied steps: two small kernels per step, no synchronisation, and right
for fused optimizers, too (https://github.com/huggingface/accelerate/issues/4242 is what
happens otherwise).

A resume needs no state of the scheduler. It runs again from its first step, with the
same operations and the same bits.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from determined_amp.amp.counts import StepCounts
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.simulated_schedule import RateTable, Row, Simulation

logger = logging.getLogger(__name__)


class RateSchedule:
    """Moves the rates of one optimizer; each kind overrides what moves it, and what it
    saves.

    Attributes:
        by_steps: Whether the rate of a step is known from the count of applied steps.
        by_validations: Whether it needs the metric of each validation.
    """

    by_steps = False
    by_validations = False

    def place_rate(self, counts: StepCounts) -> None:
        """Put the rate of the next step into the optimizer. No synchronisation if it is
        fused.
        """

    def validated(self, metric: float) -> None:
        """Called with the metric of every validation."""

    def counts_were_loaded(self) -> None:
        """The next counts are those of a saved state, which may have skips of another
        precision.
        """

    def state_dict(self) -> StateDict | None:
        """What a checkpoint must hold, as plain numbers; None if the counts are
        enough.
        """
        return None

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state, once the optimizer is restored; its settings
        stay.
        """


class AppliedStepSchedule(RateSchedule):
    """Moves a torch scheduler with applied steps only; nothing else may step it.

    A fused optimizer reads its rate on the device, so where steps can be skipped it
    gets the rate from a table there, 4 bytes per step and group. Its other values
    (momentum, betas) must be numbers of the host and follow attempted steps. Any other
    optimizer makes the host wait for `found_inf` in `scaler.step` anyway, so the host
    knows which steps were applied, and computes with numbers: it gets them, by applied
    steps. A schedule that is still constant, or whose steps cannot be skipped, does not
    use the device.

    The scheduler's counters (`last_epoch`) run ahead of the training; its `get_last_lr`
    returns the rates in use.

    Args:
        scheduler: Any `LRScheduler` except `ReduceLROnPlateau`.
        device: Where the optimizer's parameters are.
        skips: Whether steps can be skipped at all, that is, whether a `GradScaler` is
            enabled.

    Attributes:
        optimizer: The scheduler's optimizer.
        on_device: Whether the rates come from a table on the device.

    Raises:
        ConfigError: if the optimizer's rate is a tensor on a device other than the CPU.
    """

    by_steps = True

    def __init__(
        self, scheduler: lr_scheduler.LRScheduler, device: torch.device, *, skips: bool
    ) -> None:
        self.optimizer = scheduler.optimizer
        _refuse_rates_on_a_device(scheduler)
        self._scheduler = scheduler
        self._device = device
        fused = bool(self.optimizer.defaults.get("fused"))
        self.on_device = skips and fused
        self._asks_device = skips and not fused
        self._simulation = Simulation(scheduler)
        scheduler.step = self._refuse_step  # type: ignore[method-assign]  # nobody else's now
        self._last_of_scheduler = scheduler.get_last_lr
        self._known: object = scheduler.get_last_lr()
        scheduler.get_last_lr = partial(_rates_of, self.optimizer)  # type: ignore[method-assign]
        self._table: RateTable | None = None
        self._logged: set[str] = set()
        self._skips = skips
        self._skipped: int | None = None

    def place_rate(self, counts: StepCounts) -> None:
        known = None if self.on_device else counts.applied_on_host
        self.move(counts.attempted, counts.applied if known is None else known)

    def move(self, attempted: int, applied: torch.Tensor | int) -> None:
        """Put the values of the next step into the optimizer's groups.

        Call it before training, after a resume with the restored counts, and after
        every step; the counts only grow.

        Args:
            attempted: Steps attempted so far.
            applied: Steps applied so far, at most `attempted`; of a fused optimizer
                that can skip steps (), int64, on the device. No synchronisation if it
                is a number, if the optimizer is fused, or if the schedule has been
                constant so far.

        Raises:
            ConfigError: if the scheduler was stepped, or its state loaded, by somebody
                else; if it
            raises at its first step.
        """
        self._refuse_other_hands()
        simulation = self._simulation
        if simulation.constant and not simulation.is_behind(attempted):
            self._warn_of_end(self._step_on_host(attempted, applied))
            return
        while simulation.is_behind(attempted):
            self._tabulate(simulation.extend())
            self._known = self._last_of_scheduler()
            self._refuse_to_stand_still()
            # forgets what is not needed
            simulation.at(self._step_on_host(attempted, applied))
        step = self._step_on_host(attempted, applied)
        self._put(step, applied)
        self._warn_of_end(step)

    def _put(self, step: int, applied: torch.Tensor | int) -> None:
        """Put the values of a step into the groups, with the rates of the table if
        there is one.
        """
        simulation, groups = self._simulation, self.optimizer.param_groups
        if simulation.has_forgotten(step):
            problem = (
                f"{self._name()} has moved further than the state; allowed: to go back "
                "with a new scheduler and a new loop"
            )
            raise ConfigError("load_state_dict", [problem])
        if len(groups) > simulation.groups:
            self._warn_once(
                f"{self._name()} does not move the parameter groups that were added "
                "after it was made: their values stay as they are"
            )
        for group, values in zip(groups, simulation.at(step), strict=False):
            group.update(values)
        if self._table is not None:
            assert isinstance(applied, torch.Tensor)
            for group, rate in zip(groups, self._table.look_up(applied), strict=False):
                group["lr"] = rate

    def counts_were_loaded(self) -> None:
        self._skipped = None

    def _refuse_to_stand_still(self) -> None:
        """Raise if the scheduler raised at its first step: that is a fault, and not its
        end.
        """
        simulation = self._simulation
        if simulation.end is not None and simulation.length == 1:
            raise ConfigError(
                "wrap_lr_scheduler",
                [
                    f"{self._name()} raised at its first step: {simulation.end}; "
                    "allowed: one that needs only the number of steps, because it is "
                    "stepped ahead of the training"
                ],
            )

    def _warn_of_end(self, step: int) -> None:
        simulation = self._simulation
        if simulation.end is not None and step > simulation.length:
            self._warn_once(
                f"{self._name()} ends after {simulation.length} steps "
                f"({simulation.end}); later steps keep its last values"
            )

    def _step_on_host(self, attempted: int, applied: torch.Tensor | int) -> int:
        if self._asks_device and not self._simulation.constant:
            return int(applied)
        if self._skipped is None:
            # Nothing is skipped here, but steps may have been skipped before a resume.
            self._skipped = 0 if self._skips else attempted - int(applied)
        return attempted - self._skipped

    def _tabulate(self, rows: list[Row]) -> None:
        simulation = self._simulation
        if not self.on_device or simulation.constant:
            return
        if self._table is None:
            rows = simulation.rows()
            self._table = RateTable(len(rows[0]), self._device)
        self._table.append([[values["lr"] for values in row] for row in rows])
        if simulation.moved:
            moved = " and ".join(sorted(simulation.moved))
            self._warn_once(
                f"{self._name()} moves {moved} of a fused optimizer, which "
                "must be known on the host: they follow attempted steps, skipped ones "
                "included; the learning rate follows applied steps"
            )

    def _refuse_step(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "wrap_lr_scheduler",
            [f"leave {self._name()}.step() to amp, which calls it for applied steps"],
        )

    def _refuse_other_hands(self) -> None:
        """Raise if the list of rates is another one, as after a step or a load of the
        state.
        """
        if self._last_of_scheduler() is not self._known:
            raise ConfigError(
                "wrap_lr_scheduler",
                [
                    f"{self._name()} was stepped, or its state loaded, outside of "
                    "MixedPrecision, which does both itself; allowed: neither "
                    "scheduler.step() nor context.wrap_lr_scheduler for this scheduler"
                ],
            )

    def _name(self) -> str:
        return type(self._scheduler).__name__

    def _warn_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning(line)


def _refuse_rates_on_a_device(scheduler: lr_scheduler.LRScheduler) -> None:
    for index, group in enumerate(scheduler.optimizer.param_groups):
        if isinstance(group["lr"], torch.Tensor) and group["lr"].device.type != "cpu":
            raise ConfigError(
                "wrap_lr_scheduler",
                [
                    f"lr of parameter group {index} is a tensor on "
                    f"{group['lr'].device}; allowed: a number, which is moved to the "
                    "device where it helps"
                ],
            )


def _rates_of(optimizer: Optimizer) -> list[float | torch.Tensor]:
    return [group["lr"] for group in optimizer.param_groups]


# The state of a `ReduceLROnPlateau`; its other attributes are settings, which the trial
# makes anew.
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class PlateauSchedule(RateSchedule):
    """Moves a `ReduceLROnPlateau` with validations, and resumes it.

    Args:
        scheduler: The scheduler; from now on nothing else may step it.

    Attributes:
        optimizer: The scheduler's optimizer.
    """

    by_validations = True

    def __init__(self, scheduler: lr_scheduler.ReduceLROnPlateau) -> None:
        self.optimizer = scheduler.optimizer
        self._scheduler = scheduler
        scheduler.get_last_lr = partial(_rates_of, self.optimizer)  # type: ignore[method-assign]

    def validated(self, metric: float) -> None:
        """Step the scheduler with the metric of a validation, unless that is not
        finite.
        """
        if math.isfinite(metric):
            self._scheduler.step(metric)
        else:
            logger.warning(
                "ReduceLROnPlateau ignores a validation metric of %s", metric
            )

    def state_dict(self) -> StateDict:
        # The rates are in the state of the optimizer.
        return {key: getattr(self._scheduler, key) for key in _PLATEAU_STATE}

    def load_state_dict(self, state_dict: StateDict) -> None:
        for key in _PLATEAU_STATE:
            setattr(self._scheduler, key, state_dict[key])


def schedule_of(scheduler: Any, device: torch.device, *, skips: bool) -> RateSchedule:
    """The schedule that moves a scheduler of torch; see `AppliedStepSchedule` for the
    arguments.
    """
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return PlateauSchedule(scheduler)
    return AppliedStepSchedule(scheduler, device, skips=skips)
