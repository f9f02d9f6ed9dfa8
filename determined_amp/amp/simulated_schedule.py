"""A scheduler of torch that runs ahead of the training, and its rates as a table on the
device.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from determined_amp.amp.patched import patched

# Steps simulated at once.
_AHEAD = 256

# torch reminds users to call `optimizer.step` first, and the SequentialLR of an older
# torch calls a deprecated method. Neither warning is about the user's code.
_WARNINGS_OF_A_SIMULATION = (
    r"Detected call of `lr_scheduler\.step\(\)`",
    r"Seems like `optimizer\.step\(\)` has been overridden",
    r"The epoch parameter in `scheduler\.step\(\)`",
)

# The values of every group at one step.
_State = list[dict[str, Any]]
# What one step uses: the values of every group that the scheduler moves, by their keys.
Row = tuple[Mapping[str, Any], ...]


class Simulation:
    """A scheduler that runs ahead of the training, on copies of the optimizer's groups.

    Later changes to the optimizer's own groups (`load_state_dict`, new rates) do not
    disturb it.

    Args:
        scheduler: The scheduler; from now on nothing else may step it.

    Attributes:
        length: Rows made so far; row `i` is for the step after `i` applied ones.
        moved: Keys of the groups, beside `lr`, that the scheduler has changed.
        constant: Whether every row so far equals the first one.
        end: The error that the scheduler raised past its end; None before that.
    """

    def __init__(self, scheduler: lr_scheduler.LRScheduler) -> None:
        self.length = 0
        self.moved: set[str] = set()
        self.constant = True
        self.end: str | None = None
        self._scheduler = scheduler
        self._step = scheduler.step
        groups = scheduler.optimizer.param_groups
        not_copied = {id(group["params"]): group["params"] for group in groups}
        self._groups = copy.deepcopy(groups, not_copied)
        self._initial = _state_of(self._groups)
        self._rows: deque[Row] = deque()

    def is_behind(self, step: int) -> bool:
        """Whether the row of this step has not been made yet."""
        return self.end is None and step >= self.length

    def has_forgotten(self, step: int) -> bool:
        """Whether the row of this step was forgotten."""
        return not self.constant and step < self.length - len(self._rows)

    @property
    def groups(self) -> int:
        """How many groups it moves."""
        return len(self._initial)

    def extend(self) -> list[Row]:
        """Make the rows of the next steps. Equal neighbours are the same object."""
        states = self._simulate()
        if not self.length:
            states.insert(0, self._initial)
        for state in states:
            for initial, group in zip(self._initial, state, strict=True):
                self.moved.update(_changed(initial, group))
        self.moved.discard("lr")
        rows = [self._append(state) for state in states]
        self.constant = self.constant and all(row is self._rows[0] for row in rows)
        return rows

    def at(self, step: int) -> Row:
        """The row of a step, the last one past the end. Rows before it are
        forgotten.
        """
        if self.constant:
            return self._rows[0]
        forgotten = self.length - len(self._rows)
        for _ in range(min(step, self.length - 1) - forgotten):
            self._rows.popleft()
        return self._rows[0]

    def rows(self) -> list[Row]:
        """All rows that are not forgotten; while the schedule is constant, that is all
        of them.
        """
        return list(self._rows)

    def _append(self, state: _State) -> Row:
        row: Row = tuple(map(self._shown, state))
        if self._rows and row == self._rows[-1]:
            row = self._rows[-1]
        self._rows.append(row)
        self.length += 1
        return row

    def _shown(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The rate of a group, and its other values that the scheduler moves."""
        return {key: group[key] for key in ("lr", *self.moved) if key in group}

    def _simulate(self) -> list[_State]:
        states: list[_State] = []
        own_groups = patched(self._scheduler.optimizer, "param_groups", self._groups)
        try:
            with own_groups, warnings.catch_warnings():
                for message in _WARNINGS_OF_A_SIMULATION:
                    warnings.filterwarnings("ignore", message, UserWarning)
                for _ in range(_AHEAD):
                    self._step()
                    states.append(_state_of(self._groups))
        # Past its end a scheduler may raise anything: OneCycleLR a ValueError, a list
        # of rates an IndexError; (1 - step / steps) ** 0.9 becomes a complex number,
        # which is no float.
        except Exception as error:
            self.end = f"{type(error).__name__}: {error}"
        return states


def _state_of(groups: _State) -> _State:
    """A copy of the groups, whose rates are numbers; raises if one is not."""
    return [{**group, "lr": float(group["lr"])} for group in groups]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ; no scheduler adds or removes one."""
    # Nearly all are the same object: this runs for every value of every step.
    return [
        key
        for key, value in now.items()
        if value is not before[key] and value != before[key]
    ]


class RateTable:
    """The rates of all groups at every step, on the device.

    Args:
        groups: The number of the optimizer's groups.
        device: The device of the fused kernels.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        self._device = device
        # CUDA's fused kernels read a float32; those of a CPU need the same number as
        # other kernels.
        self._dtype = torch.float32 if device.type == "cuda" else torch.float64
        self._table = torch.empty((0, groups), dtype=self._dtype, device=device)
        # Kernels write to whole tensors; their elements, the same memory, are the
        # numbers in them.
        self._index = torch.zeros(1, dtype=torch.int64, device=device)
        self._row = torch.zeros((1, groups), dtype=self._dtype, device=device)
        self._index_number, self._rates = self._index[0], self._row[0].unbind()

    def append(self, rates: list[list[float]]) -> None:
        """Add the rates of every group, for every step. No synchronisation."""
        chunk = torch.tensor(rates, dtype=self._dtype)
        if self._device.type == "cuda":
            chunk = chunk.pin_memory().to(self._device, non_blocking=True)
        self._table = torch.cat([self._table, chunk])

    def look_up(self, step: torch.Tensor) -> Iterable[torch.Tensor]:
        """The rates of a step, the last ones past the end: (), the same tensors each
        time.
        """
        torch.clamp(step, max=len(self._table) - 1, out=self._index_number)
        torch.index_select(self._table, 0, self._index, out=self._row)
        return self._rates
