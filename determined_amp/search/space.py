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
from typing import Any

from optuna import distributions

from determined_amp.amp.errors import Problem
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
    hyperparameters: Mapping[str, Any]  # the section of the YAML

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

    def nested(self, point: Mapping[str, Any]) -> dict[str, Any]:
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
        if isinstance(values[name], Mapping) and "type" in values[name]:
            axes.extend(_axis(values[name], name, problems))
    return Space(tuple(axes), hyperparameters)


def _axis(raw: Mapping[str, Any], name: str, problems: list[Problem]) -> Iterator[Axis]:
    """The axis of one hyperparameter; none after adding a mistake to `problems`."""
    place, kind = f"hyperparameters.{name}", str(raw["type"])
    if kind == "categorical":
        yield from _choices(raw, name, place, problems)
    elif kind not in _RANGES:
        kinds = f"const, categorical, {', '.join(_RANGES)}, or no key of that name"
        problems.append(Problem(f"{place}.type", f"got {kind!r}; allowed: {kinds}"))
    elif span := read(_RANGES[kind], raw, place, problems):
        yield Axis(name, span.distribution(), tuple(span.grid()), span.ends())


@dataclass(frozen=True, kw_only=True)
class _Double:
    type: str = setting()
    minval: float = setting()
    maxval: float = setting()
    count: int | None = setting(None, at_least=1, at_most=MOST_TRIALS)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.minval >= self.maxval:
            yield "minval", f"got {self.minval:g}; allowed: less than maxval {self.maxval:g}"

    def ends(self) -> tuple[float, float]:
        return self.minval, self.maxval

    def grid(self) -> list[float]:
        return self.evenly_spaced(self.count or 0)

    def distribution(self) -> distributions.BaseDistribution:
        return distributions.FloatDistribution(*self.ends())

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

    def grid(self) -> list[float]:
        most = self.maxval - self.minval + 1
        return [round(value) for value in self.evenly_spaced(min(self.count or 0, most))]

    def distribution(self) -> distributions.BaseDistribution:
        return distributions.IntDistribution(self.minval, self.maxval)


@dataclass(frozen=True, kw_only=True)
class _Log(_Double):
    """Its ends are exponents."""

    base: float = setting(above=1)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(fields_set)
        if math.log2(self.base) * max(abs(self.minval), abs(self.maxval)) > 1000:
            text = "is no range of float64; minval and maxval are exponents"
            yield "minval", f"{self.base:g}^{self.minval:g} to {self.base:g}^{self.maxval:g} {text}"

    def ends(self) -> tuple[float, float]:
        return self.base**self.minval, self.base**self.maxval

    def grid(self) -> list[float]:
        return [self.base**exponent for exponent in super().grid()]

    def distribution(self) -> distributions.BaseDistribution:
        return distributions.FloatDistribution(*self.ends(), log=True)


_RANGES = {"double": _Double, "int": _Int, "log": _Log}


def _choices(
    raw: Mapping[str, Any], name: str, place: str, problems: list[Problem]
) -> Iterator[Axis]:
    """The axis of a categorical hyperparameter; none after a mistake."""
    vals, others = raw.get("vals"), raw.keys() - {"type", "vals"}
    wrong = [Problem(f"{place}.{key}", "unknown key; allowed: type, vals") for key in others]
    if not isinstance(vals, list) or not vals:
        wrong.append(Problem(f"{place}.vals", f"got {vals!r}; allowed: a list of values"))
    problems.extend(wrong)
    if wrong or not isinstance(vals, list):
        return
    # Optuna stores only scalars, and cannot tell 1 from true.
    scalars = all(isinstance(value, Scalar) for value in vals)
    is_json = not scalars or len(set(vals)) < len(vals)
    choices = tuple(json.dumps(value) for value in vals) if is_json else tuple(vals)
    distribution = distributions.CategoricalDistribution(choices)
    yield Axis(name, distribution, choices, choices, is_json)
