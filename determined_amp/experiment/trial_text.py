"""Whether a trial `module:Class` can be there, by its files: nothing is imported.

To import a trial is to import torch, which takes seconds. A typo is named before.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable
from importlib import util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from determined_amp.amp.errors import near_name

# With one of these a module can get attributes that its text does not show.
_DYNAMIC = re.compile(r"\b(globals|locals|vars|exec|sys|__getattr__)\b|import \*")


def typo_in(import_path: str) -> str:
    """What `module:name` lacks, with a near name, if files show that it cannot be
    imported; else nothing.

    `importlib.util.find_spec` of a whole dotted name would import the packages above
    it.
    """
    module, _, name = import_path.partition(":")
    first, *others = [*module.split("."), name.partition(".")[0]]
    if module in sys.modules or first in ("", "__main__"):
        return ""
    if not name:
        return not_importable(import_path, "it has to be MODULE:CLASS")
    spec, above = util.find_spec(first), first
    if spec is None:
        near = near_name(first, _files_in([os.getcwd()]))
        return not_importable(import_path, f"No module named {first!r}{near}")
    for part in others:
        names = None if spec is None else _names_in(spec)
        if spec is None or names is None:
            return ""
        if part not in names:
            text = f"{above!r} has no {part!r}{near_name(part, names)}"
            return not_importable(import_path, text)
        folders = spec.submodule_search_locations or []
        spec, above = PathFinder.find_spec(part, list(folders)), f"{above}.{part}"
    return ""


def not_importable(import_path: str, why: str) -> str:
    """What is wrong with a trial that cannot be imported."""
    wrong = f"got {import_path!r}, which cannot be imported: {why}"
    return f"{wrong}; searched: {os.getcwd()}"


def _names_in(spec: ModuleSpec) -> set[str] | None:
    """The names that a module may have; None if only an import can tell."""
    names = _files_in(spec.submodule_search_locations or ())
    if spec.origin is None:  # a folder without an __init__.py
        return names
    try:
        text = Path(spec.origin).read_text(encoding="utf-8")
        ast.parse(text)
    except (OSError, SyntaxError, ValueError):  # built in, no text, or no Python
        return None
    return None if _DYNAMIC.search(text) else names | {*re.findall(r"\w+", text)}


def _files_in(folders: Iterable[str]) -> set[str]:
    """The names of modules and packages in some folders."""
    there = [Path(folder) for folder in folders if Path(folder).is_dir()]
    return {path.name.partition(".")[0] for each in there for path in each.iterdir()}
