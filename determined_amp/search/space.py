"""Hyperparameter spaces: what is sampled, and which points a grid has.

The forms are those of Determined 0.38.1. A mapping with a `type` is a space, any other mapping is a
section, and anything else is a constant. A grid over `log` has evenly spaced exponents. A grid over
`int` or `double` has evenly spaced values. Both ends are included; a single point is the middle. A
grid over `int` has at most one point per integer.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Axis:
    """One hyperparameter that is searched."""

    path: tuple[str, ...]  # its keys under `hyperparameters`
    # Optuna's distribution: uniform, or uniform in the exponent for `log`.
    distribution: distributions.BaseDistribution
    grid: tuple[Scalar, ...]  # its points in a grid; empty without a `count`
    # The values that the choices of a categorical distribution stand for.
    values: Mapping[Scalar, Any] | None = None

    @property
    def name(self) -> str:
        """The dotted name, such as `amp.init_scale`."""
        return ".".join(self.path)

    def ends(self) -> tuple[Any, ...]:
        """All choices, or both ends of a range: if these are valid, every value is."""
        if isinstance(self.distribution, distributions.CategoricalDistribution):
            return tuple(self.distribution.choices)
        low, high = self.distribution.low, self.distribution.high  # type: ignore[attr-defined]
        return (low, high)


@dataclass(frozen=True)
class Space:
    """All hyperparameters of a search."""

    axes: tuple[Axis, ...]  # the searched hyperparameters, sorted by name, level by level
    constants: Mapping[str, Any]  # the hyperparameters that are not searched, nested as in the YAML

    @property
    def grid_size(self) -> int:
        """The number of points of the grid."""
        return math.prod(len(axis.grid) for axis in self.axes)

    def grid(self) -> list[dict[str, Scalar]]:
        """Every point, by dotted name, from the last one; the last name varies fastest."""
        points = itertools.product(*(axis.grid for axis in self.axes))
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, point, strict=True)) for point in points][::-1]

    def probes(self) -> Iterator[dict[str, Any]]:
        """A few points that together contain every end and every choice of each axis."""
        ends = [axis.ends() for axis in self.axes]
        for i in range(max(map(len, ends), default=1)):
            values = (end[min(i, len(end) - 1)] for end in ends)
            yield dict(zip((axis.name for axis in self.axes), values, strict=True))

    def nested(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of the trial at a point, nested, constants included."""
        sample: dict[str, Any] = json.loads(json.dumps(self.constants))
        for axis in self.axes:
            value = point[axis.name]
            put(sample, axis.path, value if axis.values is None else axis.values[value])
        return sample


def read_space(
    hyperparameters: object, problems: list[str], *, grid: bool, path: tuple[str, ...] = ()
) -> Space:
    """The space of a `hyperparameters` section.

    Args:
        hyperparameters: The section.
        problems: A sentence per mistake is appended.
        grid: Whether every range needs a `count`.
        path: The keys of a nested section.
    """
    place = ".".join(("hyperparameters", *path))
    if not isinstance(hyperparameters, Mapping):
        text = f"got {hyperparameters!r}; allowed: a mapping of keys to values"
        problems.append(Problem(place, text))
        return Space((), {})
    axes: list[Axis] = []
    constants: dict[str, Any] = {}
    for key in sorted(hyperparameters, key=str):
        value, here = hyperparameters[key], (*path, str(key))
        if not isinstance(value, Mapping):
            constants[str(key)] = value
        elif "type" not in value:
            section = read_space(value, problems, grid=grid, path=here)
            axes.extend(section.axes)
            constants[str(key)] = section.constants
        elif value["type"] == "const":
            constants[str(key)] = value.get("val")
        else:
            axes.extend(_read_axis(value, here, problems, grid=grid))
    return Space(tuple(axes), constants)


@dataclass(frozen=True, kw_only=True)
class _Range:
    type: str = setting()
    minval: float = setting()
    maxval: float = setting()
    count: int | None = setting(None, at_least=1, at_most=MOST_TRIALS)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.minval >= self.maxval:
            yield "minval", f"got {self.minval:g}; allowed: less than maxval {self.maxval:g}"

    def axis(self, path: tuple[str, ...]) -> Axis:
        distribution = distributions.FloatDistribution(self.minval, self.maxval)
        return Axis(path, distribution, tuple(self.points(self.count or 0)))

    def points(self, count: int) -> list[float]:
        """`count` evenly spaced values with both ends; a single value is the middle."""
        if count == 1:
            return [(self.minval + self.maxval) / 2.0]
        width = self.maxval - self.minval
        return [self.minval + i * width / (count - 1) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class _IntRange(_Range):
    minval: int = setting()
    maxval: int = setting()

    def axis(self, path: tuple[str, ...]) -> Axis:
        count = min(self.count or 0, self.maxval - self.minval + 1)
        grid = tuple(round(value) for value in self.points(count))
        return Axis(path, distributions.IntDistribution(self.minval, self.maxval), grid)


@dataclass(frozen=True, kw_only=True)
class _LogRange(_Range):
    base: float = setting(above=0)

    def contradictions(self, fields_set: frozenset[str]) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(fields_set)
        try:
            ends = [math.pow(self.base, exponent) for exponent in (self.minval, self.maxval)]
        except OverflowError:
            ends = [math.inf]
        if not 0 < min(ends) < max(ends) < math.inf:
            yield (
                "minval",
                f"{self.base:g}^{self.minval:g} to {self.base:g}^{self.maxval:g} is no range of "
                "float64; minval and maxval are exponents",
            )

    def axis(self, path: tuple[str, ...]) -> Axis:
        low, high = sorted(math.pow(self.base, end) for end in (self.minval, self.maxval))
        grid = tuple(math.pow(self.base, exponent) for exponent in self.points(self.count or 0))
        return Axis(path, distributions.FloatDistribution(low, high, log=True), grid)


_RANGES: dict[str, type[_Range]] = {"double": _Range, "int": _IntRange, "log": _LogRange}


def _read_axis(
    raw: Mapping[str, Any], path: tuple[str, ...], problems: list[str], *, grid: bool
) -> Iterator[Axis]:
    place = ".".join(("hyperparameters", *path))
    before, kind = len(problems), raw["type"]
    if kind == "categorical":
        axis = _categorical(raw, path, place, problems)
    elif isinstance(kind, str) and kind in _RANGES:
        span = read(_RANGES[kind], raw, place, problems)
        axis = None if span is None else span.axis(path)
    else:
        kinds = f"const, categorical, {', '.join(_RANGES)}, or no key of that name"
        problems.append(Problem(f"{place}.type", f"got {kind!r}; allowed: {kinds}"))
        return
    if axis is not None and grid and not axis.grid:
        problems.append(Problem(f"{place}.count", "missing; a grid needs it"))
    elif axis is not None and len(problems) == before:
        yield axis


def _categorical(
    raw: Mapping[str, Any], path: tuple[str, ...], place: str, problems: list[str]
) -> Axis | None:
    for key in raw.keys() - {"type", "vals"}:
        problems.append(Problem(f"{place}.{key}", "unknown key; allowed: type, vals"))
    vals = raw.get("vals")
    if not isinstance(vals, list) or not vals:
        problems.append(Problem(f"{place}.vals", f"got {vals!r}; allowed: a list of values"))
        return None
    # Optuna stores only scalars and cannot tell 1 from true. If that is a problem, each choice is
    # the JSON text of its value.
    scalars = all(isinstance(value, (bool, int, float, str, type(None))) for value in vals)
    plain = scalars and len(set(vals)) == len(vals)
    choices = vals if plain else [json.dumps(value) for value in vals]
    if len(set(choices)) < len(choices):
        text = f"got a value twice in {vals!r}; allowed: each once"
        problems.append(Problem(f"{place}.vals", text))
        return None
    values = dict(zip(choices, vals, strict=True))
    return Axis(path, distributions.CategoricalDistribution(choices), tuple(choices), values)
