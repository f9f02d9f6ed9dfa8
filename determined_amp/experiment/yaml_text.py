"""YAML by the platform's rules, for all commands, with or without a cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML

from determined_amp.amp.errors import ConfigError, Problem, one_line

_PLAIN = (str, int, float, bool, type(None))


def load_yaml(text: str, source: str) -> Any:
    """Read YAML by the rules of `det experiment create`.

    Determined reads YAML 1.2: `1e-4` is a number, `032` is 32, `yes` and `1:30` are text, and a key
    that occurs twice is an error. PyYAML reads YAML 1.1, which differs in each of these.

    Raises:
        ConfigError: if it is not YAML, or contains something that a configuration cannot: a date,
            a key that is not text, a section within itself.
    """
    try:
        # The same reader as Determined's, whose own function imports half of Determined.
        value = YAML(typ="safe", pure=True).load(text)
        problems = list(_unusual(value, ""))
    except Exception as error:  # the reader raises whatever its constructors do
        raise ConfigError(source, [f"is not YAML: {_problem(error)}"]) from error
    if problems:
        raise ConfigError(source, problems)
    return value


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which also quotes text that is a number only in YAML 1.2."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|[-+]?(0o)?[0-9_]+$"),
    list("-+.0123456789"),
)


def dump_yaml(value: Any) -> str:
    """Text that `load_yaml` reads as the same value; keys keep their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))


def read_text(path: str | Path) -> str:
    """The content of a text file, read as UTF-8 in every locale.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    except ValueError as error:  # not UTF-8, or a path with a NUL
        raise ConfigError(str(path), [f"cannot be read as UTF-8 text: {error}"]) from error


def _problem(error: Exception) -> str:
    """The problem and its position, without the loader's advice for programmers."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem:
        return one_line(error)
    if "duplicate key" in problem:
        problem = f"{one_line(problem)}: merge the two sections of this name into one"
    where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    return f"{one_line(problem)}{where}"


def _unusual(value: Any, path: str) -> Iterator[Problem]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _unusual(inner, f"{path}.{key}" if path else key)
            else:
                yield Problem(path or "top level", f"got the key {key!r}; allowed: text, in quotes")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _unusual(inner, f"{path}[{index}]")
    elif not isinstance(value, _PLAIN):
        kind = type(value).__name__
        yield Problem(path, f"got a {kind}; allowed: text in quotes, or a number")
