"""Whether a trial `module:Class` can be there, by its files: nothing is imported.

To import a trial is to import torch, which takes seconds. A typo is named before.
"""

from __future__ import annotations

import ast
import difflib
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from importlib import util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# With one of these names a module can get attributes that its text does not show.
_DYNAMIC = {"globals", "locals", "vars", "exec", "sys.modules", "__getattr__", "*"}


def refuse_typo(import_path: str) -> None:
    """Refuse `module:name` if there is no such module, or its text has no such name.

    Raises:
        ValueError: naming what is missing, with a near name.
        SyntaxError: if the module is no Python.
    """
    module, _, name = import_path.partition(":")
    spec = _spec_of(module) if module else None
    names = None if spec is None else _names_in(spec)
    wanted = name.partition(".")[0]
    if names is not None and wanted not in names:
        near = near_name(wanted, names)
        raise ValueError(f"module {module!r} has no attribute {wanted!r}{near}")


def near_name(name: str, names: Iterable[str]) -> str:
    """A question that names the nearest of some names; empty if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _spec_of(module: str) -> ModuleSpec | None:
    """Where a module is; None if only an import can tell.

    `importlib.util.find_spec` would import the packages above it.

    Raises:
        ValueError: if there is no such module.
    """
    first, *others = module.split(".")
    if module in sys.modules or not first:
        return None
    spec = util.find_spec(first)
    folders: Iterable[str] = [os.getcwd()]
    for part in others:
        if spec is None:
            break
        if _names_in(spec) is None:
            return None
        folders = spec.submodule_search_locations or ()
        # By its last name alone: a whole one would look for the packages above it.
        spec = PathFinder.find_spec(part, list(folders))
    if spec is None:
        there = [found.name for found in pkgutil.iter_modules(folders)]
        near = near_name(module.rpartition(".")[2], there)
        raise ValueError(f"No module named {module!r}{near}")
    return spec


def _names_in(spec: ModuleSpec) -> set[str] | None:
    """The names that a module can have; None if its text does not tell."""
    folders = spec.submodule_search_locations
    names = {found.name for found in pkgutil.iter_modules(folders or ())}
    if spec.origin is None:  # a folder without an __init__.py
        return names
    if not spec.origin.endswith(".py"):
        return None
    tree = ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    for node in ast.walk(tree):
        names.update(_bound_by(node))
    return None if names & _DYNAMIC else names


def _bound_by(node: ast.AST) -> Iterator[str]:
    """The names that a piece of a program may bind, and those that make it dynamic."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node) if node.attr == "modules" else ""
