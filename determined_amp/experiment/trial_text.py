"""Finds typos in the name `module:Class` of a trial, without importing the trial.

Importing a trial imports torch, which takes seconds. So we name a typo before.
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

# A module with one of these words can have attributes that its text does not show. Its
# own name lets a helper set them.
_DYNAMIC = re.compile(
    r"\b(globals|locals|vars|exec|sys|__getattr__|__path__)\b|import \*"
    r"|(?<!if )(?<!getLogger\()\b__name__"
)


def typo_in(import_path: str) -> str:
    """Say why `module:name` cannot be imported, with a near name, if its files show
    that; empty if they do not.

    We look up one part after the other, because `importlib.util.find_spec` of a dotted
    name would import the packages above it.
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
    """Say that a trial cannot be imported, and why."""
    wrong = f"got {import_path!r}, which cannot be imported: {why}"
    return f"{wrong}; searched: {os.getcwd()}"


def _names_in(spec: ModuleSpec) -> set[str] | None:
    """The names that a module may have; None if only an import can tell."""
    names = _files_in(spec.submodule_search_locations or ())
    if spec.origin is None:  # a folder without an __init__.py
        return names
    try:
        text = Path(spec.origin).read_text(encoding="utf-8")
        body = ast.parse(text).body
    except (OSError, SyntaxError, ValueError):  # built in, not text, or not Python
        return None
    statements = [one.value for one in body if isinstance(one, ast.Expr)]
    calls = any(isinstance(one, ast.Call) for one in statements)  # such as a helper's
    if calls or _DYNAMIC.search(text):
        return None
    return names | {*re.findall(r"\w+", text)}


def _files_in(folders: Iterable[str]) -> set[str]:
    """The names of modules and packages in some folders."""
    there = [Path(folder) for folder in folders if Path(folder).is_dir()]
    return {path.name.partition(".")[0] for each in there for path in each.iterdir()}
