"""Access to nested mappings by dotted name, such as
`hyperparameters.amp.init_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from determined_amp.amp.plain_data import Config, Values


def value_at(config: Config, name: str) -> Any:
    """The value with a dotted name; None if there is none."""
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def put(config: Values, path: Sequence[str], value: object) -> None:
    """Set the value at `path` in place, and create missing sections.

    Raises:
        TypeError: if a section of the path is a value.
    """
    *sections, last = path
    for key in sections:
        if config.get(key) is None:
            config[key] = {}
        config = config[key]
        if not isinstance(config, dict):
            raise TypeError(f"{key} is a value, not a section")
    config[last] = value


def flat(config: Config) -> Values:
    """The values of `leaves` by dotted name."""
    return {".".join(path): value for path, value in leaves(config)}


def leaves(config: Config) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value with the keys that lead to it. An empty section has no values.

    A search space stays one value; `{type: const, val: x}` becomes x.
    """
    for key, value in config.items():
        is_section = isinstance(value, Mapping)
        # A hyperparameter may be called `type`, too.
        if is_section and (key == "hyperparameters" or "type" not in value):
            for path, leaf in leaves(value):
                yield (str(key), *path), leaf
        elif is_section and value["type"] == "const":
            yield (str(key),), value.get("val")
        else:
            yield (str(key),), value
