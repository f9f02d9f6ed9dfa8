"""Learning-rate schedules that move with applied steps, not with attempted ones.

A step that GradScaler skips leaves the weights alone, so the schedule must not move
either. torch's schedulers count on the host, and asking there whether a step was
skipped costs a device synchronisation. So here the scheduler runs ahead of the
training, on its own copy of the groups' values, and we keep the results: row i is for
the step after i applied ones. A fused optimizer gets its rate from a table of these
rows on the device, indexed by the count of applied steps: two small kernels per step,
no synchronisation
(https://github.com/huggingface/accelerate/issues/4242 shows what happens otherwise).

A resume needs no state of the scheduler. The scheduler runs again from its first step,
with the same operations and the same bits. Its first rates are saved, to see whether it
begins as before.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler

from determined_amp.amp.counts import StepCounts
from determined_amp.amp.errors import ConfigError
from determined_amp.amp.patched import patched
from determined_amp.amp.plain_data import StateDict
from determined_amp.amp.torch_private import reads_found_inf

logger = logging.getLogger(__name__)

# How many steps a scheduler runs ahead at once.
_AHEAD = 256

# torch reminds users to call `optimizer.step` first, and the SequentialLR of an older
# torch calls a deprecated method. Neither warning is about the user's code.
_WARNINGS_OF_RUNNING_AHEAD = (
    r"Detected call of `lr_scheduler\.step\(\)`",
    r"Seems like `optimizer\.step\(\)` has been overridden",
    r"The epoch parameter in `scheduler\.step\(\)`",
)


class RateSchedule:
    """Moves the rates of one optimizer. Subclasses decide when, and what they save.

    Args:
        scheduler: The torch scheduler. From now on nothing else may step it.

    Attributes:
        optimizer: The scheduler's optimizer.
        moved: When the scheduler moves, in words.
        by_steps: Whether the count of applied steps determines the rate.
        by_validations: Whether the scheduler needs the metric of each validation.
    """

    moved: str
    by_steps = False
    by_validations = False

    def __init__(self, scheduler: Any) -> None:
        self.optimizer: Optimizer = scheduler.optimizer
        self._name = type(scheduler).__name__
        self._step = scheduler.step
        scheduler.step = self._refuse_step
        scheduler.get_last_lr = partial(_rates_of, self.optimizer)

    def _refuse_step(self, *args: Any, **kwargs: Any) -> None:
        raise _refusal(f"leave {self._name}.step() to amp, which calls it {self.moved}")

    def place_rate(self, counts: StepCounts) -> None:
        """Put the rate of the next step into the optimizer."""

    def validated(self, metric: float) -> None:
        """Called with the metric of every validation."""

    def state_dict(self) -> StateDict | None:
        """What a checkpoint must hold, in plain numbers; None if counts suffice."""
        return None

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a saved state, after the optimizer is restored."""


class AppliedStepSchedule(RateSchedule):
    """Moves a torch scheduler with applied steps only.

    An optimizer that reads `found_inf` on the device, as a fused one does, can read its
    rate there, too. Where steps can be skipped it gets the rate from a table on the
    device, 4 bytes per step and group on CUDA. Its other values (momentum, betas) must
    be numbers on the host, so they follow attempted steps. With any other optimizer the
    host waits for `found_inf` in `scaler.step` anyway. So the host knows which steps
    were applied, and sets numbers.

    A rate takes 32 bytes of host memory per step, betas take 88. The scheduler's
    counters (`last_epoch`) run ahead of the training; its `get_last_lr` returns the
    rates in use.

    Args:
        scheduler: Any `LRScheduler` except `ReduceLROnPlateau`.
        device: Where the optimizer's parameters are.
        skips: Whether steps can be skipped at all, that is, whether a `GradScaler` is
            enabled.

    Raises:
        ConfigError: if the optimizer's rate is a tensor on a device other than the CPU.
    """

    moved = "for applied steps"
    by_steps = True

    def __init__(
        self,
        scheduler: lr_scheduler.LRScheduler,
        device: torch.device,
        *,
        skips: bool,
    ) -> None:
        groups = scheduler.optimizer.param_groups
        _refuse_rates_on_a_device(groups)
        self._get_last_lr = scheduler.get_last_lr
        self._known = self._last_rates()
        super().__init__(scheduler)
        not_copied = {id(group["params"]): group["params"] for group in groups}
        # A copy, so that later changes to the optimizer's groups (`load_state_dict`,
        # new rates) do not disturb the scheduler.
        self._groups = copy.deepcopy(groups, not_copied)
        self._first = _values_of(self._groups)
        # Then the scheduler may have begun with the rate of a later step.
        self._is_late = _has_stepped(scheduler.optimizer)
        # By group and key, the values of all rows: rates, and what else has moved.
        self._columns: dict[tuple[int, str], list[Any]] = {
            (number, "lr"): [values["lr"]] for number, values in enumerate(self._first)
        }
        self._length = 1  # of each column
        self._end: str | None = None  # the error that the scheduler raised past its end
        # The rates on the device, (groups, steps), if the optimizer reads them there.
        self._table: torch.Tensor | None = None
        if skips and reads_found_inf(self.optimizer):
            # CUDA's fused kernels read a float32. A CPU's fused kernels need the same
            # number as its other kernels.
            dtype = torch.float32 if device.type == "cuda" else torch.float64
            rates = [[values["lr"]] for values in self._first]
            self._table = torch.tensor(rates, dtype=dtype, device=device)
        self._logged: set[str] = set()

    def state_dict(self) -> StateDict:
        return {"first_rates": self._first_rates()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Check that the scheduler begins as in the training that was saved.

        Raises:
            ConfigError: if it does not because it was wrapped after the optimizer was
                loaded. A rate that its user has changed since is no mistake.
        """
        saved, first = state_dict.get("first_rates"), self._first_rates()
        if self._is_late and saved is not None and saved != first:
            raise _refusal(
                f"{self._name} begins with the rates {first}, and in the training that "
                f"was saved with {saved}, because its optimizer was loaded before; "
                "allowed: make and wrap it before optimizer.load_state_dict(...)"
            )

    def _first_rates(self) -> list[float]:
        return [values["lr"] for values in self._first]

    def place_rate(self, counts: StepCounts) -> None:
        known = counts.applied_on_host if self._table is None else None
        self.move(counts.attempted, counts.applied if known is None else known)

    def move(self, attempted: int, applied: torch.Tensor | int) -> None:
        """Put the values of the next step into the optimizer's groups.

        Call it before training, after a resume with the restored counts, and after
        every step. It synchronises only without a table, if `applied` is a tensor.

        Args:
            attempted: Steps attempted so far.
            applied: Steps applied so far, at most `attempted`. With a table: (), int64,
                on the device.

        Raises:
            ConfigError: if other code stepped the scheduler or loaded its state, or the
                scheduler raises at its first step.
        """
        self._refuse_other_hands()
        step = int(applied) if self._table is None else attempted
        # One row more than needed, to meet an error in the first step before training.
        while self._end is None and step + 1 >= self._length:
            self._run_ahead()
        row, groups = min(step, self._length - 1), self.optimizer.param_groups
        for (number, key), values in self._columns.items():
            groups[number][key] = values[row]
        if self._table is not None:
            assert isinstance(applied, torch.Tensor)
            index = applied.clamp(max=self._table.shape[1] - 1)
            rates = torch.index_select(self._table, 1, index).squeeze(1).unbind()
            for group, rate in zip(groups, rates, strict=False):
                group["lr"] = rate
        self._warn_of_what_stays(step)

    def _run_ahead(self) -> None:
        """Compute the rows of the next steps. No synchronisation."""
        before = self._length
        own_groups = patched(self.optimizer, "param_groups", self._groups)
        with own_groups, warnings.catch_warnings():
            for message in _WARNINGS_OF_RUNNING_AHEAD:
                warnings.filterwarnings("ignore", message, UserWarning)
            # Past its end a scheduler may raise anything: OneCycleLR a ValueError, a
            # list of rates an IndexError; (1 - step / steps) ** 0.9 becomes a complex
            # number, which float() refuses.
            try:
                for _ in range(_AHEAD):
                    self._step()
                    self._append(_values_of(self._groups))
            except Exception as error:
                self._end = f"{type(error).__name__}: {error}"
        self._known = self._last_rates()
        if self._end is not None and self._length == 1:
            raise _refusal(
                f"{self._name} raised at its first step: {self._end}; allowed: one "
                "that needs only the number of steps, because it is stepped ahead of "
                "the training"
            )
        if self._table is not None:
            self._table = self._extended(self._table, before)
            self._warn_of_what_follows_attempted_steps()

    def _extended(self, table: torch.Tensor, before: int) -> torch.Tensor:
        """The table, extended by the rates of the rows from `before` on."""
        numbers = range(len(self._groups))
        rates = [self._columns[number, "lr"][before:] for number in numbers]
        chunk = torch.tensor(rates, dtype=table.dtype)
        if table.device.type == "cuda":
            chunk = chunk.pin_memory().to(table.device, non_blocking=True)
        return torch.cat([table, chunk], dim=1)

    def _append(self, row: list[dict[str, Any]]) -> None:
        """Append a row to the columns."""
        for number, values in enumerate(row):
            first = self._first[number]
            for key, value in values.items():
                column = self._columns.get((number, key))
                # `is not` is the fast path: most values are the same object.
                if column is None and value is not first[key] and value != first[key]:
                    column = self._columns[number, key] = [first[key]] * self._length
                if column is not None:
                    column.append(value)
        self._length += 1

    def _warn_of_what_follows_attempted_steps(self) -> None:
        moved = sorted({key for _, key in self._columns} - {"lr"})
        if moved:
            self._warn_once(
                f"{self._name} moves {' and '.join(moved)} of a fused optimizer, "
                "which must be known on the host: they follow attempted steps, skipped "
                "ones included; the learning rate follows applied steps"
            )

    def _warn_of_what_stays(self, step: int) -> None:
        if self._end is not None and step > self._length:
            self._warn_once(
                f"{self._name} ends after {self._length} steps ({self._end}); "
                "later steps keep its last values"
            )
        if len(self.optimizer.param_groups) > len(self._groups):
            self._warn_once(
                f"{self._name} does not move the parameter groups that were added "
                "after it was made: their values stay as they are"
            )

    def _warn_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            logger.warning(line)

    def _last_rates(self) -> object:
        """The list of rates of the scheduler's last step; None if its class replaces
        torch's `step`, and makes no list.
        """
        try:
            return self._get_last_lr()
        except AttributeError:
            return None

    def _refuse_other_hands(self) -> None:
        """Raise if the scheduler has a new list of rates, as after a step or a load."""
        if self._last_rates() is not self._known:
            raise _refusal(
                f"{self._name} was stepped, or its state loaded, outside of amp, "
                "which does both itself; allowed: neither scheduler.step() nor "
                "context.wrap_lr_scheduler for this scheduler"
            )


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has a state of steps, its own or loaded ones; synchronises.

    A plain SGD has none. An Adagrad has one with 0 steps at once.
    """
    states = [*getattr(optimizer, "state", {}).values()]
    steps = [state.get("step", "momentum_buffer" in state) for state in states]
    return any(float(step) > 0 for step in steps)


def _values_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of the groups with rates as floats; raises if a rate is not a number."""
    return [{**group, "lr": float(group["lr"])} for group in groups]


def _refuse_rates_on_a_device(groups: list[dict[str, Any]]) -> None:
    for index, group in enumerate(groups):
        rate = group["lr"]
        if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
            raise _refusal(
                f"lr of parameter group {index} is a tensor on {rate.device}; allowed: "
                "a number, which is moved to the device where it helps"
            )


def _refusal(problem: str) -> ConfigError:
    return ConfigError("wrap_lr_scheduler", [problem])


def _rates_of(optimizer: Optimizer) -> list[float | torch.Tensor]:
    return [group["lr"] for group in optimizer.param_groups]


# The state of a `ReduceLROnPlateau`. Its other attributes are settings, which the
# trial's code sets again.
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class PlateauSchedule(RateSchedule):
    """Moves a `ReduceLROnPlateau` with validations, and resumes it."""

    moved = "after each validation, in a loop by amp.validated(metric)"
    by_validations = True

    def __init__(self, scheduler: lr_scheduler.ReduceLROnPlateau) -> None:
        super().__init__(scheduler)
        self._scheduler = scheduler

    def validated(self, metric: float) -> None:
        """Step the scheduler with the metric of a validation, if it is finite."""
        if math.isfinite(metric):
            self._step(metric)
        else:
            logger.warning(
                "ReduceLROnPlateau ignores a validation metric of %s", metric
            )

    def state_dict(self) -> StateDict:
        # The optimizer's state has the rates.
        return {key: getattr(self._scheduler, key) for key in _PLATEAU_STATE}

    def load_state_dict(self, state_dict: StateDict) -> None:
        # Another scheduler may have been saved.
        for key in state_dict.keys() & set(_PLATEAU_STATE):
            setattr(self._scheduler, key, state_dict[key])


def schedule_of(scheduler: Any, device: torch.device, *, skips: bool) -> RateSchedule:
    """The schedule for a torch scheduler; `skips` as for `AppliedStepSchedule`."""
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return PlateauSchedule(scheduler)
    return AppliedStepSchedule(scheduler, device, skips=skips)
