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
from determined_amp.experiment.dotted import put
from determined_amp.experiment.fields import read

# The platform's own limit (`MaxAllowedTrials`). The whole grid is made before its first trial.
MOST_TRIALS = 2000

Scalar = bool | int | float | str | None

_RANGES = ("double", "int", "log")


@dataclass(frozen=True)
class Axis:
    """One hyperparameter that is searched."""

    path: tuple[str, ...]  # its keys under `hyperparameters`
    # Optuna's distribution: uniform, or uniform in the exponent for `log`.
    distribution: distributions.BaseDistribution
    grid: tuple[Scalar, ...]  # its points in a grid; empty without a `count`
    ends: tuple[Scalar, ...]  # all choices, or both ends of a range: if they are valid, all are
    is_json: bool = False  # whether each choice is the JSON text of its value

    @property
    def name(self) -> str:
        """The dotted name, such as `amp.init_scale`."""
        return ".".join(self.path)


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
        points = itertools.product(*(axis.grid for axis in self.axes))
        named = [self._named(point) for point in points]
        return named[::-1]

    def probes(self) -> Iterator[dict[str, Scalar]]:
        """A few points that together contain every end and every choice of each axis."""
        most = max((len(axis.ends) for axis in self.axes), default=1)
        for i in range(most):
            yield self._named(tuple(axis.ends[min(i, len(axis.ends) - 1)] for axis in self.axes))

    def _named(self, point: tuple[Scalar, ...]) -> dict[str, Scalar]:
        return {axis.name: value for axis, value in zip(self.axes, point, strict=True)}

    def nested(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of the trial at a point, nested, constants included."""
        sample = copy.deepcopy(dict(self.hyperparameters))
        for axis in self.axes:
            value = point[axis.name]
            put(sample, axis.path, json.loads(value) if axis.is_json else value)
        return sample


def read_space(hyperparameters: object, problems: list[Problem]) -> Space:
    """The space of a `hyperparameters` section; a sentence per mistake is added to `problems`."""
    if not isinstance(hyperparameters, Mapping):
        text = f"got {hyperparameters!r}; allowed: a mapping of keys to values"
        problems.append(Problem("hyperparameters", text))
        return Space((), {})
    return Space(tuple(_axes(hyperparameters, (), problems)), hyperparameters)


def _axes(
    section: Mapping[str, Any], path: tuple[str, ...], problems: list[Problem]
) -> Iterator[Axis]:
    for key in sorted(section, key=str):
        value, here = section[key], (*path, str(key))
        if not isinstance(value, Mapping) or value.get("type") == "const":
            continue
        if "type" not in value:
            yield from _axes(value, here, problems)
            continue
        axis = _axis(value, here, problems)
        if axis is not None:
            yield axis


def _axis(raw: Mapping[str, Any], path: tuple[str, ...], problems: list[Problem]) -> Axis | None:
    """The axis of one hyperparameter; None after adding a mistake to `problems`."""
    place, kind = ".".join(("hyperparameters", *path)), raw["type"]
    if kind == "categorical":
        return _choices(raw, path, place, problems)
    if kind not in _RANGES:
        kinds = f"const, categorical, {', '.join(_RANGES)}, or no key of that name"
        problems.append(Problem(f"{place}.type", f"got {kind!r}; allowed: {kinds}"))
        return None
    span = read(_Range, raw, place, problems)
    return None if span is None else span.axis(path)


@dataclass(frozen=True, kw_only=True)
class _Range:
    type: str = setting()
    minval: float = setting()
    maxval: float = setting()
    count: int | None = setting(None, at_least=1, at_most=MOST_TRIALS)
    base: float | None = setting(None, above=1)  # of `log`, whose ends are exponents

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.minval >= self.maxval:
            yield "minval", f"got {self.minval:g}; allowed: less than maxval {self.maxval:g}"
        if self.type == "int":
            for key, end in (("minval", self.minval), ("maxval", self.maxval)):
                if not end.is_integer():
                    yield key, f"got {end:g}; allowed: an integer"
        if self.type != "log":
            if self.base is not None:
                yield "base", "given; only log takes it"
        elif self.base is None:
            yield "base", "missing; log needs it"
        elif math.log2(self.base) * max(abs(self.minval), abs(self.maxval)) > 1000:
            text = "is no range of float64; minval and maxval are exponents"
            yield "minval", f"{self.base:g}^{self.minval:g} to {self.base:g}^{self.maxval:g} {text}"

    def axis(self, path: tuple[str, ...]) -> Axis:
        distribution: distributions.BaseDistribution
        if self.type == "int":
            low, high = int(self.minval), int(self.maxval)
            most = min(self.count or 0, high - low + 1)
            grid = tuple(round(value) for value in self._points(most))
            distribution = distributions.IntDistribution(low, high)
            return Axis(path, distribution, grid, (low, high))
        points, ends = self._points(self.count or 0), (self.minval, self.maxval)
        if self.base is not None:
            points = [self.base**exponent for exponent in points]
            ends = (self.base**self.minval, self.base**self.maxval)
        distribution = distributions.FloatDistribution(*ends, log=self.base is not None)
        return Axis(path, distribution, tuple(points), ends)

    def _points(self, count: int) -> list[float]:
        """`count` evenly spaced values with both ends; a single value is the middle."""
        if count == 1:
            return [(self.minval + self.maxval) / 2.0]
        width = self.maxval - self.minval
        return [self.minval + i * width / (count - 1) for i in range(count)]


def _choices(
    raw: Mapping[str, Any], path: tuple[str, ...], place: str, problems: list[Problem]
) -> Axis | None:
    """The axis of a categorical hyperparameter."""
    for key in raw.keys() - {"type", "vals"}:
        problems.append(Problem(f"{place}.{key}", "unknown key; allowed: type, vals"))
    vals = raw.get("vals")
    if not isinstance(vals, list) or not vals:
        problems.append(Problem(f"{place}.vals", f"got {vals!r}; allowed: a list of values"))
        return None
    # Optuna stores only scalars, and cannot tell 1 from true.
    scalars = all(isinstance(value, (bool, int, float, str, type(None))) for value in vals)
    is_json = not scalars or len(set(vals)) < len(vals)
    choices = tuple(json.dumps(value) for value in vals) if is_json else tuple(vals)
    if len(set(choices)) < len(choices):
        text = f"got a value twice in {vals!r}; allowed: each once"
        problems.append(Problem(f"{place}.vals", text))
        return None
    distribution = distributions.CategoricalDistribution(choices)
    return Axis(path, distribution, choices, choices, is_json)
