"""Hyperparameter spaces by the platform's rules: what can be sampled, and which points a grid has.

The rules are those of Determined 0.38.1 (`master/pkg/searcher/grid.go` and `hyperparameters.go`).
A mapping with a `type` is a space, one without nests, anything else is a constant. A grid of a
`log` space has evenly spaced exponents, of `int` and `double` evenly spaced values, ends included;
a single point is the middle; an `int` never has more points than integers.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from optuna import distributions

from determined_amp.config.settings import read, setting

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Axis:
    """One hyperparameter that is searched.

    Args:
        path: Its keys under `hyperparameters`.
        distribution: How Optuna draws it: uniformly, for `log` uniformly in the exponent.
        grid: Its points in a grid, in the platform's order; empty without a `count`.
        values: What the entries of a categorical distribution stand for.
    """

    path: tuple[str, ...]
    distribution: distributions.BaseDistribution
    grid: tuple[Scalar, ...]
    values: Mapping[Scalar, Any] | None = None

    @property
    def name(self) -> str:
        """The dotted name, as in `amp.init_scale`."""
        return ".".join(self.path)

    def ends(self) -> tuple[Any, ...]:
        """Values that show whether all of them are legal: all of a choice, the ends of a range."""
        if isinstance(self.distribution, distributions.CategoricalDistribution):
            return tuple(self.distribution.choices)
        low, high = self.distribution.low, self.distribution.high  # type: ignore[attr-defined]
        return (low, high)


@dataclass(frozen=True)
class Space:
    """All hyperparameters of a search.

    Args:
        axes: Those that are searched, in the platform's order: sorted by name, level by level.
        constants: The others, nested as in the YAML.
    """

    axes: tuple[Axis, ...]
    constants: Mapping[str, Any]

    def grid(self) -> list[dict[str, Scalar]]:
        """Every point by dotted names, in the order in which the platform starts their trials.

        The last name moves fastest, and the platform takes the points from the end.
        """
        points = itertools.product(*(axis.grid for axis in self.axes))
        names = [axis.name for axis in self.axes]
        return [dict(zip(names, point, strict=True)) for point in points][::-1]

    def probes(self) -> Iterator[dict[str, Any]]:
        """A few points in which every end and every choice of an axis occurs."""
        ends = [axis.ends() for axis in self.axes]
        for i in range(max(map(len, ends), default=1)):
            values = (end[min(i, len(end) - 1)] for end in ends)
            yield dict(zip((axis.name for axis in self.axes), values, strict=True))

    def nested(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of one trial as a cluster hands them over: a point and constants."""
        sample: dict[str, Any] = json.loads(json.dumps(self.constants))
        for axis in self.axes:
            value = point[axis.name]
            _put(sample, axis.path, value if axis.values is None else axis.values[value])
        return sample


def nest(axes: tuple[Axis, ...], hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `hyperparameters` that are searched, nested."""
    found: dict[str, Any] = {}
    for axis in axes:
        value: Any = hyperparameters
        for key in axis.path:
            value = value[key]
        _put(found, axis.path, value)
    return found


def _put(sample: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, last = path
    for key in parents:
        sample = sample.setdefault(key, {})
    sample[last] = value


def read_space(
    hyperparameters: object, problems: list[str], *, grid: bool, path: tuple[str, ...] = ()
) -> Space:
    """The space that a `hyperparameters` section describes.

    Args:
        hyperparameters: The section.
        problems: Receives a sentence per mistake.
        grid: Whether every range needs a `count`.
        path: Where the section is.
    """
    place = ".".join(("hyperparameters", *path))
    if not isinstance(hyperparameters, Mapping):
        problems.append(f"{place}: got {hyperparameters!r}; allowed: a mapping of keys to values")
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
    count: int | None = setting(None, at_least=1)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        if self.minval >= self.maxval:
            yield "minval", f"got {self.minval:g}; allowed: less than maxval {self.maxval:g}"

    def points(self, count: int) -> list[float]:
        """`count` values from end to end; the middle for one."""
        if count == 1:
            return [(self.minval + self.maxval) / 2.0]
        width = self.maxval - self.minval
        return [self.minval + i * width / (count - 1) for i in range(count)]


@dataclass(frozen=True, kw_only=True)
class _IntRange(_Range):
    minval: int = setting()
    maxval: int = setting()


@dataclass(frozen=True, kw_only=True)
class _LogRange(_Range):
    base: float = setting(above=0)

    def contradictions(self, given: frozenset[str]) -> Iterator[tuple[str, str]]:
        yield from super().contradictions(given)
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


def _read_axis(
    raw: Mapping[str, Any], path: tuple[str, ...], problems: list[str], *, grid: bool
) -> Iterator[Axis]:
    place = ".".join(("hyperparameters", *path))
    readers: dict[str, Callable[[], Axis | None]] = {
        "categorical": lambda: _categorical(raw, path, place, problems),
        "double": lambda: _double(path, read(_Range, raw, place, problems)),
        "int": lambda: _int(path, read(_IntRange, raw, place, problems)),
        "log": lambda: _log(path, read(_LogRange, raw, place, problems)),
    }
    reader = readers.get(raw["type"]) if isinstance(raw["type"], str) else None
    if reader is None:
        problems.append(
            f"{place}.type: got {raw['type']!r}; allowed: const, {', '.join(readers)}, or no key "
            "of that name"
        )
        return
    before = len(problems)
    axis = reader()
    if axis is not None and grid and not axis.grid:
        problems.append(f"{place}.count: missing; a grid needs it")
    elif axis is not None and len(problems) == before:
        yield axis


def _double(path: tuple[str, ...], found: _Range | None) -> Axis | None:
    if found is None:
        return None
    grid = found.points(found.count) if found.count else ()
    return Axis(path, distributions.FloatDistribution(found.minval, found.maxval), tuple(grid))


def _int(path: tuple[str, ...], found: _IntRange | None) -> Axis | None:
    if found is None:
        return None
    count = min(found.count or 0, found.maxval - found.minval + 1)
    grid = [_round(value) for value in found.points(count)] if count else ()
    return Axis(path, distributions.IntDistribution(found.minval, found.maxval), tuple(grid))


def _log(path: tuple[str, ...], found: _LogRange | None) -> Axis | None:
    if found is None:
        return None
    points = found.points(found.count) if found.count else ()
    low, high = sorted(math.pow(found.base, end) for end in (found.minval, found.maxval))
    grid = tuple(math.pow(found.base, exponent) for exponent in points)
    return Axis(path, distributions.FloatDistribution(low, high, log=True), grid)


def _round(value: float) -> int:
    """As Go's `math.Round`: halves away from zero, where Python's go to the even neighbour."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def _categorical(
    raw: Mapping[str, Any], path: tuple[str, ...], place: str, problems: list[str]
) -> Axis | None:
    for key in raw.keys() - {"type", "vals"}:
        problems.append(f"{place}.{key}: unknown key; allowed: type, vals")
    vals = raw.get("vals")
    if not isinstance(vals, list) or not vals:
        problems.append(f"{place}.vals: got {vals!r}; allowed: a list of values")
        return None
    # Optuna stores scalars, and takes 1 and true for one value. Else a value goes by its JSON text.
    scalars = all(isinstance(value, (bool, int, float, str, type(None))) for value in vals)
    plain = scalars and len(set(vals)) == len(vals)
    choices = vals if plain else [json.dumps(value) for value in vals]
    if len(set(choices)) < len(choices):
        problems.append(f"{place}.vals: got a value twice in {vals!r}; allowed: each once")
        return None
    values = dict(zip(choices, vals, strict=True))
    return Axis(path, distributions.CategoricalDistribution(choices), tuple(choices), values)
