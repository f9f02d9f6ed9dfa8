"""Checks settings from a YAML or a script, and names every mistake.

A settings class is a frozen dataclass whose fields are declared with `setting`. `read`
makes one from a section of a YAML, `fill` from the arguments of a call. Both check
types and bounds, and ask the class for contradictions between fields. Nothing is
guessed: an unknown key, a string for a number and a float for an integer are mistakes.

There is one exception: a float field accepts an integer, because a cluster passes
hyperparameters as JSON, where 65536.0 becomes 65536.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import operator
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from determined_amp.amp.errors import ConfigError, Problem, near_name, nearest

T = TypeVar("T")

# Contradictions between fields, as pairs `(key, sentence)`.
Contradictions = Iterator[tuple[str, str]]

# How messages describe the type of a value.
_IN_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple: "a list of strings",
    list: "a list of values",
}
_MAPPING = "a mapping of keys to values"

# The metadata key of the bounds of a field that `setting` declared: the sign, the
# comparison and the limit of each.
BOUNDS = "bounds"


def setting(
    default: object = dataclasses.MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a field of a settings class; without a default the key is required."""
    bounds = (
        (">=", operator.ge, at_least),
        (">", operator.gt, above),
        ("<=", operator.le, at_most),
        ("<", operator.lt, below),
    )
    given = [bound for bound in bounds if bound[-1] is not None]
    return dataclasses.field(default=default, metadata={BOUNDS: given})


def is_settings_class(cls: object) -> bool:
    """Whether `cls` is a dataclass with all its fields declared by `setting`."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return False
    return all(BOUNDS in field.metadata for field in dataclasses.fields(cls))


def read(cls: type[T], raw: object, path: str, problems: list[Problem]) -> T | None:
    """Build `cls` from the mapping `raw`, or extend `problems` and return None.

    Args:
        cls: A frozen dataclass. Each field is a `bool`, `int`, `float`, `str`,
            `tuple[str, ...]`, an `enum.Enum`, another settings class, a number or an
            enum, or one of these `| None`. The class may define `contradictions(self,
            fields_set: frozenset[str]) -> Contradictions`. It may define
            `section_of(text: str)`, which returns the section that a text stands for,
            or None, and `ALLOWED`, which describes both forms. With `READ_IN_PART =
            True` it reads only the keys of its fields: other keys are not mistakes,
            and null counts as a missing key.
        raw: The section, as read from YAML or JSON, or settings that were built before.
        path: Dotted name of the section, for messages; empty for the whole
            configuration.
        problems: The mistakes found so far; new ones are appended.
    """
    if isinstance(raw, cls):
        return raw
    section_of = getattr(cls, "section_of", None)
    if isinstance(raw, str) and section_of is not None:
        raw = section_of(raw) or raw
    if not isinstance(raw, Mapping):
        allowed = getattr(cls, "ALLOWED", _MAPPING)
        problems.append(Problem(path, f"got {shown(raw)}; allowed: {allowed}"))
        return None
    settings = cls.__new__(cls)
    return settings if fill(settings, raw, path, problems) else None


def fill(
    settings: object, raw: Mapping[Any, object], path: str, problems: list[Problem]
) -> bool:
    """Set the fields of a settings object that has none yet.

    Args:
        settings: An empty object of a settings class.
        raw: See `read`. A script may give an enumeration member instead of its word.
        path: See `read`.
        problems: See `read`.

    Returns:
        False if mistakes were appended to `problems`.
    """
    cls: Any = type(settings)
    fields = dataclasses.fields(cls)
    names = [field.name for field in fields]
    if getattr(cls, "READ_IN_PART", False):
        raw = {name: raw[name] for name in names if raw.get(name) is not None}
    unknown = [str(key) for key in raw if key not in names]
    allowed = f"; allowed: {', '.join(names)}"
    found = [
        Problem(_join(path, key), f"unknown key{near_name(key, names, allowed)}")
        for key in unknown
    ]
    hints = _hints_of(cls)
    for field in fields:
        if field.name not in raw and nearest(field.name, unknown):
            continue  # it is misspelt, not missing
        place = _join(path, field.name)
        value = _value(hints[field.name], raw, place, field, found)
        object.__setattr__(settings, field.name, value)
    if not found and hasattr(cls, "contradictions"):
        given = frozenset(key for key in raw if raw[key] is not None)
        pairs = cls.contradictions(settings, given)
        found = [Problem(_join(path, key), text) for key, text in pairs]
    problems.extend(found)
    return not found


# Cached, because a search reads each settings class a thousand times.
_hints_of = functools.cache(typing.get_type_hints)


def read_section(cls: type[T], raw: object, path: str) -> T:
    """Build `cls` from one section of a configuration.

    Raises:
        ConfigError: naming every mistake.
    """
    problems: list[Problem] = []
    settings = read(cls, raw, path, problems)
    if settings is None:
        raise ConfigError("experiment configuration", problems)
    return settings


def plain(value: Any) -> Any:
    """Settings as plain YAML types, defaults included."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return (
        [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
    )


def shown(raw: object) -> str:
    """A value as messages show it, shortened to 60 characters."""
    text = repr(raw)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _value(
    hint: Any,
    section: Mapping[Any, object],
    path: str,
    field: dataclasses.Field[Any],
    problems: list[Problem],
) -> object:
    """The value of a field in its section. A missing required section is empty."""
    kinds, optional = _kinds(hint)
    is_missing = field.name not in section
    if is_missing and field.default is not dataclasses.MISSING:
        return field.default
    raw = section.get(field.name, {})
    if raw is None and optional:
        return None
    is_section = dataclasses.is_dataclass(kinds[0])
    if is_section:
        return read(kinds[0], raw, path, problems)
    for kind in kinds:
        value = _converted(kind, raw)
        if value is not None and (
            isinstance(value, enum.Enum) or _in_bounds(value, field)
        ):
            return value
    given = "missing" if is_missing else f"got {shown(raw)}"
    allowed = ", ".join(_described(kind, field) for kind in kinds)
    problems.append(Problem(path, f"{given}; allowed: {allowed}"))
    return None


def _converted(kind: Any, raw: Any) -> object:
    """`raw` as a value of type `kind`, or None if it is not one."""
    if _is_enum(kind):
        if isinstance(raw, kind):
            return raw
        # Compared as text: a member's value may be a bool, and in Python True == 1.
        return {repr(member.value): member for member in kind}.get(repr(raw))
    if typing.get_origin(kind) is tuple:
        listed = isinstance(raw, (list, tuple)) and all(
            isinstance(item, str) for item in raw
        )
        return tuple(raw) if listed else None
    if isinstance(raw, bool) and kind is not bool:
        return None
    if kind is float:
        is_finite = isinstance(raw, (int, float)) and abs(raw) <= sys.float_info.max
        return float(raw) if is_finite else None
    return raw if isinstance(raw, kind) else None


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _kinds(hint: Any) -> tuple[list[Any], bool]:
    """The types of a field, and whether it may be None."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    return [
        kind for kind in kinds if kind is not types.NoneType
    ], types.NoneType in kinds


def _in_bounds(value: object, field: dataclasses.Field[Any]) -> bool:
    return all(
        holds(value, bound) for _, holds, bound in field.metadata.get(BOUNDS, ())
    )


def _described(kind: Any, field: dataclasses.Field[Any]) -> str:
    if dataclasses.is_dataclass(kind):
        return _MAPPING
    if _is_enum(kind):
        return ", ".join(json.dumps(member.value).strip('"') for member in kind)
    words = _IN_WORDS[typing.get_origin(kind) or kind]
    bounds = field.metadata.get(BOUNDS, ())
    limits = " and ".join(f"{sign} {bound:.10g}" for sign, _, bound in bounds)
    return f"{words} {limits}".rstrip()
