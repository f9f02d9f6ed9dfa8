"""Reads a section of an experiment YAML into a frozen dataclass, and names every mistake in it.

A settings class is a frozen dataclass whose fields are declared with `setting`. `read` checks types
and bounds, and asks the class for contradictions between fields. It guesses nothing: an unknown
key, a string instead of a number and a float instead of an integer are mistakes.

There is one exception: a float field accepts an integer, because a cluster passes hyperparameters
as JSON, where 65536.0 becomes 65536.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from determined_amp.amp.errors import ConfigError, Problem
from determined_amp.amp.settings import BOUNDS, DECLARED

T = TypeVar("T")


@typing.runtime_checkable
class _CanContradict(typing.Protocol):
    def contradictions(self, fields_set: frozenset[str]) -> Iterable[tuple[str, str]]: ...


def is_settings_class(cls: object) -> bool:
    """Whether `cls` is a dataclass, and `setting` declares all of its fields."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return False
    return all(DECLARED in field.metadata for field in dataclasses.fields(cls))


def read(
    cls: type[T], raw: object, path: str, problems: list[str], *, strict: bool = True
) -> T | None:
    """Build `cls` from the mapping `raw`, and append its mistakes to `problems`.

    Args:
        cls: A frozen dataclass whose fields are `bool`, `int`, `float`, `str`, `tuple[str, ...]`,
            an `enum.Enum`, another settings class, a number or an enum, or one of these `| None`.
            It may define `contradictions(self, fields_set: frozenset[str])`, which yields pairs
            `(key, sentence)`, and `section_of(text: str)`, which returns the section that a text
            stands for, or None.
        raw: The section, as read from YAML or JSON.
        path: Dotted name of the section, for messages; empty for the whole configuration.
        problems: The mistakes are appended.
        strict: Whether an unknown key is a mistake. It is False for Determined's own sections,
            which have more keys than we read; null then counts as no key.

    Returns:
        The settings, or None if the section has a mistake.
    """
    section_of = getattr(cls, "section_of", None)
    if isinstance(raw, str) and section_of is not None:
        raw = section_of(raw) or raw
    if not isinstance(raw, Mapping):
        problems.append(Problem(path, f"got {_shown(raw)}; allowed: a mapping of keys to values"))
        return None
    if not strict:
        raw = {key: value for key, value in raw.items() if value is not None}
    before = len(problems)
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if strict and key not in fields:
            text = f"unknown key; {_suggestion(str(key), fields)}"
            problems.append(Problem(_join(path, key), text))
    values: dict[str, object] = {}
    for name, field in fields.items():
        place, hint, given = _join(path, name), hints[name], raw.get(name)
        if name not in raw:
            if field.default is not dataclasses.MISSING:
                continue
            if not dataclasses.is_dataclass(hint):
                problems.append(Problem(place, f"missing; allowed: {_allowed(hint, field)}"))
                continue
            given = {}  # to name the keys that are missing in this section
        values[name] = _value(hint, given, place, field, problems, strict=strict)
    if len(problems) > before:
        return None
    make: Callable[..., T] = cls
    settings = make(**values)
    fields_set = frozenset(name for name in fields if raw.get(name) is not None)
    if isinstance(settings, _CanContradict):
        wrong = settings.contradictions(fields_set)
        problems.extend(Problem(_join(path, key), text) for key, text in wrong)
    return settings if len(problems) == before else None


def read_section(cls: type[T], raw: object, path: str) -> T:
    """Build `cls` from one section of a configuration.

    Raises:
        ConfigError: naming every mistake.
    """
    problems: list[str] = []
    settings = read(cls, raw, path, problems)
    if settings is None:
        raise ConfigError("experiment configuration", problems)
    return settings


def plain(value: Any) -> Any:
    """Settings as plain YAML types: the inverse of `read`.

    Defaults that contradict other settings are left out, because `read` would refuse them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        values = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if isinstance(value, _CanContradict):
            fields_set = frozenset(name for name, held in values.items() if held is not None)
            for key, _ in value.contradictions(fields_set):
                values.pop(key, None)
        return {name: plain(held) for name, held in values.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _value(
    hint: Any,
    raw: object,
    path: str,
    field: dataclasses.Field[Any],
    problems: list[str],
    *,
    strict: bool,
) -> object:
    kinds, optional = _kinds(hint)
    if raw is None and optional:
        return None
    if dataclasses.is_dataclass(kinds[0]):
        return read(typing.cast("type[object]", kinds[0]), raw, path, problems, strict=strict)
    value = next((v for kind in kinds if (v := _converted(kind, raw)) is not None), None)
    bounds = [] if isinstance(value, enum.Enum) else _bounds(field)
    if value is None or not all(BOUNDS[name][1](value, bound) for name, bound in bounds):
        allowed = f"{_allowed(hint, field)}{_hint_for(kinds[0], raw)}"
        problems.append(Problem(path, f"got {_shown(raw)}; allowed: {allowed}"))
    return value


def _converted(kind: Any, raw: object) -> object:
    """`raw` as a value of type `kind`, or None if it is not one."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        # A member's value may be a bool, and Python's bools equal numbers.
        same = (m for m in kind if m.value == raw and isinstance(raw, type(m.value)))
        return next(same, None)
    if kind in (int, float) and isinstance(raw, bool):
        return None
    if kind is float:
        return _finite(raw) if isinstance(raw, (int, float)) else None
    if kind in (bool, int, str):
        return raw if isinstance(raw, kind) else None
    if typing.get_origin(kind) is tuple:
        listed = isinstance(raw, (list, tuple)) and all(isinstance(item, str) for item in raw)
        return tuple(typing.cast("list[str]", raw)) if listed else None
    raise TypeError(f"settings cannot hold {kind!r}")


def _finite(number: float) -> float | None:
    """The number as a float; None if it is not finite."""
    try:
        return float(number) if math.isfinite(number) else None
    except OverflowError:  # an integer too large for a float
        return None


def _kinds(hint: Any) -> tuple[list[Any], bool]:
    """The types of a field, and whether it may be None."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint], False
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return kinds, len(kinds) < len(typing.get_args(hint))


def _bounds(field: dataclasses.Field[Any]) -> list[tuple[str, float]]:
    return [(name, bound) for name, bound in field.metadata.items() if name in BOUNDS]


def _allowed(hint: Any, field: dataclasses.Field[Any]) -> str:
    kinds, optional = _kinds(hint)
    text = ", ".join(_described(kind, field) for kind in kinds)
    return text + (", or the key left out" if optional else "")


def _described(kind: Any, field: dataclasses.Field[Any]) -> str:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        values = (member.value for member in kind)
        return ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
    if dataclasses.is_dataclass(kind):
        text = "a mapping of keys to values"
    elif typing.get_origin(kind) is tuple:
        text = "a list of strings"
    else:
        text = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[kind]
    bounds = " and ".join(
        f"{BOUNDS[name][0]} {bound if isinstance(bound, int) else f'{bound:g}'}"
        for name, bound in _bounds(field)
    )
    return text + (f" {bounds}" if bounds else "")


def _hint_for(kind: Any, raw: object) -> str:
    if isinstance(raw, Mapping) and "type" in raw:
        return " (this is a search space: run it as a search, or give one value to train with)"
    if kind in (int, float) and isinstance(raw, str):
        try:
            number = float(raw)
        except ValueError:
            return ""
        if math.isfinite(number) and (kind is float or number.is_integer()):
            literal = _as_yaml_float(number) if kind is float else f"{number:.0f}"
            of_yaml_1_1 = "e" in raw.lower() and "." not in raw
            why = f"YAML 1.1 reads {raw} as a string" if of_yaml_1_1 else "this is a text in quotes"
            return f" ({why}: write {literal})"
    return ""


def _as_yaml_float(number: float) -> str:
    """`number` as a literal that every YAML reader reads as a float: 1.0e-4, not 1e-4."""
    mantissa, _, exponent = repr(number).partition("e")
    return f"{float(mantissa)}" + (f"e{exponent}" if exponent else "")


def _suggestion(key: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(fields), n=1)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(fields)}"


def _shown(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."
