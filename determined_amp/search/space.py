"""Hyperparameter spaces: what is sampled, and which points a grid has.

The forms are those of Determined 0.38.1. A mapping with a `type` is a space, any other mapping is a
section, and anything else is a constant. A grid over `log` has evenly spaced exponents. A grid over
`int` or `double` has evenly spaced values. Both ends are included; a single point is the middle. A
grid over `int` has at most one point per integer.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from optuna import distributions

from determined_amp.amp.errors import Problem
from determined_amp.amp.plain_data import Config
from determined_amp.amp.settings import setting
from determined_amp.experiment.dotted import flat, put
from determined_amp.experiment.fields import read

# The platform's own limit (`MaxAllowedTrials`). The whole grid is made before its first trial.
MOST_TRIALS = 2000

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Axis:
    """One hyperparameter that is searched."""

    name: str  # its dotted name under `hyperparameters`, such as `amp.init_scale`
    # Optuna's distribution: uniform, or uniform in the exponent for `log`.
    distribution: distributions.BaseDistribution
    grid: tuple[Scalar, ...]  # its points in a grid; empty without a `count`
    ends: tuple[Scalar, ...]  # all choices, or both ends of a range: if they are valid, all are
    is_json: bool = False  # whether each choice is the JSON text of its value


@dataclass(frozen=True)
class Space:
    """All hyperparameters of a search."""

    axes: tuple[Axis, ...]  # the searched hyperparameters, sorted by name, level by level
    hyperparameters: Config  # the section of the YAML

    @property
    def grid_size(self) -> int:
        """The number of points of the grid."""
        return math.prod(len(axis.grid) for axis in self.axes)

    def grid(self) -> list[dict[str, Scalar]]:
        """Every point, by dotted name, from the last one; the last name varies fastest."""
        names = [axis.name for axis in self.axes]
        points = itertools.product(*(axis.grid for axis in self.axes))
        return [dict(zip(names, point, strict=True)) for point in points][::-1]

    def probes(self) -> Iterator[dict[str, Scalar]]:
        """A few points that together contain every end and every choice of each axis."""
        most = max((len(axis.ends) for axis in self.axes), default=1)
        for i in range(most):
            yield {axis.name: axis.ends[min(i, len(axis.ends) - 1)] for axis in self.axes}

    def nested(self, point: Config) -> Config:
        """The hyperparameters of the trial at a point, nested, constants included."""
        sample = copy.deepcopy(dict(self.hyperparameters))
        for axis in self.axes:
            value = point[axis.name]
            put(sample, axis.name.split("."), json.loads(value) if axis.is_json else value)
        return sample


def read_space(hyperparameters: object, problems: list[Problem]) -> Space:
    """The space of a `hyperparameters` section; a sentence per mistake is added to `problems`."""
    if not isinstance(hyperparameters, Mapping):
        text = f"got {hyperparameters!r}; allowed: a mapping of keys to values"
        problems.append(Problem("hyperparameters", text))
        return Space((), {})
    values = flat(hyperparameters)
    axes: list[Axis] = []
    for name in sorted(values, key=lambda name: name.split(".")):
        raw = values[name]
        if not isinstance(raw, Mapping) or "type" not in raw:
            continue
        place, kind = f"hyperparameters.{name}", str(raw["type"])
        if kind not in _KINDS:
            kinds = f"const, {', '.join(_KINDS)}, or no key of that name"
            problems.append(Problem(f"{place}.type", f"got {kind!r}; allowed: {kinds}"))
        elif span := read(_KINDS[kind], raw, place, problems):
            axes.append(span.axis(name))
    return Space(tuple(axes), hyperparameters)


@dataclass(frozen=True, kw_only=True)
class _Choices:
    type: str = setting()
    vals: list = setting()  # type: ignore[type-arg]  # of anything

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        if not self.vals:
            yield "vals", "got []; allowed: a list of values"

    def axis(self, name: str) -> Axis:
        # Optuna stores only scalars, and cannot tell 1 from true.
        scalars = all(isinstance(value, Scalar) for value in self.vals)
        is_json = not scalars or len(set(self.vals)) < len(self.vals)
        choices = tuple(json.dumps(value) if is_json else value for value in self.vals)
        distribution = distributions.CategoricalDistribution(choices)
        return Axis(name, distribution, choices, choices, is_json)


@dataclass(frozen=True, kw_only=True)
class _Double:
    type: str = setting()
    minval: float = setting()
    maxval: float = setting()
    count: int | None = setting(None, at_least=1, at_most=MOST_TRIALS)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.minval >= self.maxval:
            yield "minval", f"got {self.minval:g}; allowed: less than maxval {self.maxval:g}"

    def axis(self, name: str) -> Axis:
        ends = self.minval, self.maxval
        grid = tuple(self.evenly_spaced(self.count or 0))
        return Axis(name, distributions.FloatDistribution(*ends), grid, ends)

    def evenly_spaced(self, count: int) -> list[float]:
        """`count` values with both ends; a single value is the middle."""
        if count == 1:
            return [(self.minval + self.maxval) / 2.0]
        width = self.maxval - self.minval
        return [self.minval + i * width / (count - 1) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class _Int(_Double):
    minval: int = setting()
    maxval: int = setting()

    def axis(self, name: str) -> Axis:
        ends = self.minval, self.maxval
        count = min(self.count or 0, self.maxval - self.minval + 1)
        grid = tuple(round(value) for value in self.evenly_spaced(count))
        return Axis(name, distributions.IntDistribution(*ends), grid, ends)


@dataclass(frozen=True, kw_only=True)
class _Log(_Double):
    """Its ends are exponents."""

    base: float = setting(above=1)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(fields_set)
        if math.log2(self.base) * max(abs(self.minval), abs(self.maxval)) > 1000:
            text = "is no range of float64; minval and maxval are exponents"
            yield "minval", f"{self.base:g}^{self.minval:g} to {self.base:g}^{self.maxval:g} {text}"

    def axis(self, name: str) -> Axis:
        ends = self.base**self.minval, self.base**self.maxval
        grid = tuple(self.base**exponent for exponent in self.evenly_spaced(self.count or 0))
        return Axis(name, distributions.FloatDistribution(*ends, log=True), grid, ends)


_KINDS: dict[str, type[_Choices | _Double]] = {
    "categorical": _Choices,
    "double": _Double,
    "int": _Int,
    "log": _Log,
}
