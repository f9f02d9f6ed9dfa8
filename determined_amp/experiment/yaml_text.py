"""Reads and writes YAML by the platform's rules, with or without a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from determined_amp.amp.errors import ConfigError, one_line


def load_yaml(text: str, source: str) -> Any:
    """Read YAML by the rules of `det experiment create`.

    Determined reads YAML 1.2: `1e-4` is a number, `032` is 32, `yes` and `1:30` are
    text, and a key that occurs twice is an error. PyYAML reads YAML 1.1, which differs
    in each of these.

    A master turns a configuration into JSON, so a key that is not text becomes text.

    Raises:
        ConfigError: if the text is not YAML, or has something that JSON cannot hold: a
            date, or a section within itself.
    """
    try:
        # Determined uses the same reader, but its function imports half of Determined.
        value = YAML(typ="safe", pure=True).load(text)
        return json.loads(json.dumps(value, default=_refuse))
    except MarkedYAMLError as error:
        problem, mark = one_line(error.problem), error.problem_mark
        if "duplicate key" in problem:
            problem = f"{problem}: merge the two sections of this name into one"
        problem = f"{problem} (line {mark.line + 1}, column {mark.column + 1})"
        raise ConfigError(source, [f"is not YAML: {problem}"]) from error
    except Exception as error:  # the reader's constructors can raise any error
        raise ConfigError(
            source, [f"is not YAML of a configuration: {one_line(error)}"]
        ) from error


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, which also quotes text that is a number only in YAML 1.2."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|[-+]?(0o)?[0-9_]+$"
    ),
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
        why = f"cannot be read: {error.strerror}"
        raise ConfigError(str(path), [why]) from error
    except ValueError as error:  # not UTF-8, or a path with a NUL
        raise ConfigError(
            str(path), [f"cannot be read as UTF-8 text: {error}"]
        ) from error


def _refuse(value: object) -> None:
    text = (
        f"got the {type(value).__name__} {value}; allowed: text in quotes, or a number"
    )
    raise ValueError(text)
