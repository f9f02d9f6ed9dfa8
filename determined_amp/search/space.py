"""Reads hyperparameter spaces: the ranges to sample from, and the points of a grid.

The forms are those of Determined 0.38.1. A mapping with a `type` is a space, any other
mapping is a section, and anything else is a constant. A grid over `log` has evenly
spaced exponents. A grid over `int` or `double` has evenly spaced values. It includes
both ends, and a single point is the middle. A grid over `int` has at most one point per
integer.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from optuna import distributions

from determined_amp.amp.errors import Problem
from determined_amp.amp.fields import Contradictions, read, setting
from determined_amp.amp.plain_data import Config, Values
from determined_amp.experiment.dotted import leaves, put

# The platform's own limit (`MaxAllowedTrials`). The whole grid is made before its first
# trial.
MOST_TRIALS = 2000

# Makes Optuna's distribution of a range, given its ends.
MakeDistribution = Callable[..., distributions.BaseDistribution]

# The value of a range, or a choice as JSON.
Scalar = float | str


@dataclass(frozen=True)
class Axis:
    """One hyperparameter that is searched."""

    path: tuple[str, ...]  # its keys under `hyperparameters`, such as amp, init_scale
    # Optuna's distribution: uniform, or uniform in the exponent for `log`.
    distribution: distributions.BaseDistribution
    grid: tuple[Scalar, ...]  # its points in a grid; empty for a range without `count`

    @property
    def name(self) -> str:
        """Its dotted name under `hyperparameters`."""
        return ".".join(self.path)


@dataclass(frozen=True)
class Space:
    """All hyperparameters of a search."""

    axes: tuple[Axis, ...]  # the searched hyperparameters, sorted by path
    hyperparameters: Config  # the section of the YAML

    @property
    def grid_size(self) -> int:
        """The number of points of the grid."""
        return math.prod(len(axis.grid) for axis in self.axes)

    def grid(self) -> list[Values]:
        """Every point, by dotted name, from the last point to the first. The last name
        varies fastest.
        """
        names = [axis.name for axis in self.axes]
        points = itertools.product(*(axis.grid for axis in self.axes))
        return [dict(zip(names, point, strict=True)) for point in points][::-1]

    def nested(self, point: Values) -> Config:
        """The hyperparameters of the trial at a point, nested, constants included."""
        sample = copy.deepcopy(dict(self.hyperparameters))
        for axis in self.axes:
            value = point[axis.name]
            if isinstance(value, str):  # a choice
                value = json.loads(value)
            put(sample, axis.path, value)
        return sample


def read_space(hyperparameters: object, problems: list[Problem]) -> Space:
    """Read the space of a `hyperparameters` section, and add mistakes to `problems`."""
    if not isinstance(hyperparameters, Mapping):
        text = f"got {hyperparameters!r}; allowed: a mapping of keys to values"
        problems.append(Problem("hyperparameters", text))
        return Space((), {})
    axes: list[Axis] = []
    for path, raw in sorted(leaves(hyperparameters), key=lambda leaf: leaf[0]):
        if not isinstance(raw, Mapping) or "type" not in raw:
            continue
        place, kind = ".".join(["hyperparameters", *path]), str(raw["type"])
        if kind not in _KINDS:
            kinds = f"const, {', '.join(_KINDS)}, or no key of that name"
            problems.append(Problem(f"{place}.type", f"got {kind!r}; allowed: {kinds}"))
        elif span := read(_KINDS[kind], raw, place, problems):
            axes.append(span.axis(path))
    return Space(tuple(axes), hyperparameters)


@dataclass(frozen=True, kw_only=True)
class _Choices:
    type: str = setting()
    vals: list = setting()  # type: ignore[type-arg]  # of anything

    def contradictions(self, fields_set: frozenset[str]) -> Contradictions:
        if not self.vals:
            yield "vals", "got []; allowed: a list of values"

    def axis(self, path: tuple[str, ...]) -> Axis:
        # Optuna stores only scalars, and cannot tell 1 from true.
        choices = tuple(map(json.dumps, self.vals))
        drawn = distributions.CategoricalDistribution(choices)
        return Axis(path, drawn, choices)


@dataclass(frozen=True, kw_only=True)
class _Double:
    distribution: ClassVar[MakeDistribution] = distributions.FloatDistribution

    type: str = setting()
    minval: float = setting()
    maxval: float = setting()
    count: int | None = setting(None, at_least=1, at_most=MOST_TRIALS)

    def contradictions(self, fields_set: frozenset[str]) -> Contradictions:
        if self.minval >= self.maxval:
            yield (
                "minval",
                f"got {self.minval:.10g}; allowed: less than maxval {self.maxval:.10g}",
            )

    def axis(self, path: tuple[str, ...]) -> Axis:
        ends = self.value(self.minval), self.value(self.maxval)
        grid = dict.fromkeys(map(self.value, self.evenly_spaced()))
        return Axis(path, self.distribution(*ends), tuple(grid))

    def evenly_spaced(self) -> list[float]:
        """`count` numbers, both ends included. A single number is the middle."""
        if self.count == 1:
            return [(self.minval + self.maxval) / 2.0]
        width, count = self.maxval - self.minval, self.count or 0
        return [self.minval + i * width / (count - 1) for i in range(count)]

    def value(self, number: float) -> float:
        """The hyperparameter for a number between `minval` and `maxval`."""
        return number


@dataclass(frozen=True, kw_only=True)
class _Int(_Double):
    distribution: ClassVar[MakeDistribution] = distributions.IntDistribution

    minval: int = setting()
    maxval: int = setting()

    def value(self, number: float) -> float:
        return round(number)


@dataclass(frozen=True, kw_only=True)
class _Log(_Double):
    """A range whose ends are exponents of `base`."""

    distribution: ClassVar[MakeDistribution] = functools.partial(
        distributions.FloatDistribution, log=True
    )

    base: float = setting(above=1)

    def contradictions(self, fields_set: frozenset[str]) -> Contradictions:
        yield from super().contradictions(fields_set)
        if math.log2(self.base) * max(abs(self.minval), abs(self.maxval)) > 1000:
            yield (
                "minval",
                f"beyond float64: minval and maxval are exponents of {self.base:g}",
            )

    def value(self, number: float) -> float:
        return math.pow(self.base, number)


_KINDS: dict[str, type[_Choices | _Double]] = {
    "categorical": _Choices,
    "double": _Double,
    "int": _Int,
    "log": _Log,
}
