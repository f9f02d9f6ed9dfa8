"""Private names of Determined and of torch are in one file each, and are still
there.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import determined as det
import pytest
from determined import core, pytorch
from determined.common import api

import determined_amp
from determined_amp.check import probe
from determined_amp.local import checkpoint_storage, local_reports, trainer
from determined_amp.trial import determined_private

LIBRARY = Path(determined_amp.__file__).parent
PRIVATE = Path(determined_private.__file__)
DETERMINED = Path(det.__file__).parent
MODULES = [
    *DETERMINED.glob("*.py"),
    *DETERMINED.glob("core/*.py"),
    *DETERMINED.glob("pytorch/*.py"),
]
# A text that may be a name, wherever it stands: in a call, a tuple, a table.
A_NAME = re.compile(r"[a-zA-Z_][\w.]*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def names_in(source: str) -> Iterator[tuple[int, str, bool]]:
    """Every private attribute, by name, by string, or imported: line, name, and if of
    `self`.
    """
    for node in ast.walk(ast.parse(source)):
        names: list[object] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [
                *(node.module or "").split("."),
                *(alias.name for alias in node.names),
            ]
        elif isinstance(node, ast.Constant) and A_NAME.fullmatch(str(node.value)):
            names = [*str(node.value).split(".")]
        is_of_self = isinstance(node, ast.Attribute) and is_self(node.value)
        for name in map(str, names):
            if is_private(name):
                yield getattr(node, "lineno", 0), name, is_of_self


def defined_in(source: str) -> Iterator[str]:
    """What a file defines, or sets on an object of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if is_self(node.value) else []


@cache
def defined_in_the_library() -> frozenset[str]:
    return frozenset(
        name for path in LIBRARY.rglob("*.py") for name in defined_in(path.read_text())
    )


@cache
def words_of_determined() -> frozenset[str]:
    everything = "\n".join(path.read_text() for path in MODULES)
    return frozenset(re.findall(r"\b_[a-zA-Z]\w*", everything))


def touched(path: Path) -> list[str]:
    """The private names of Determined in a file of the library that defines none of
    that name.
    """
    source = path.read_text()
    own = set(defined_in(source))
    found = []
    for line, name, is_of_self in names_in(source):
        ours = own | defined_in_the_library() if is_of_self else own
        if name in words_of_determined() and name not in ours:
            found.append(f"{path.name}:{line} {name}")
    return found


def overridden(cls: type) -> list[str]:
    """The private methods of Determined that a class of ours replaces."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("determined.")]
    theirs = {name for base in bases for name in vars(base)}
    replaced = theirs.intersection(vars(cls)) - {"_abc_impl"}
    return sorted(filter(is_private, replaced))


def test_private_names_that_are_used_are_still_those_of_determined() -> None:
    source = PRIVATE.read_text()
    used = {name for _, name, _ in names_in(source)}
    gone = used - words_of_determined() - set(defined_in(source))
    assert gone == set(), f"Determined {det.__version__} does not have them any more"


def test_private_methods_that_the_library_replaces_are_called_by_determined() -> None:
    controller: Any = pytorch._PyTorchTrialController
    contexts = (core.DummyTrainContext, core.DummyCheckpointContext)
    calls = "".join(
        map(inspect.getsource, (controller, *contexts, core.CheckpointContext))
    )
    for cls in (
        determined_private.SafeController,
        determined_private.WatchedController,
        determined_private.BatchCollector,
    ):
        for name in overridden(cls):
            assert f"self.{name}(" in calls, (
                f"Determined {det.__version__} calls no {name}"
            )


# Names that Python or torch and Determined both have, in files that mean the former.
OF_OTHERS = {"_fields", "_version", "_buffers", "_length", "_core"}


def test_no_other_file_touches_a_private_name_of_determined() -> None:
    others = [path for path in sorted(LIBRARY.rglob("*.py")) if path != PRIVATE]
    found = [each for path in others for each in touched(path)]
    assert [each for each in found if each.rpartition(" ")[2] not in OF_OTHERS] == []


@pytest.mark.parametrize(
    "cls",
    [
        trainer.LocalController,
        probe.Examined,
        checkpoint_storage.LocalCheckpoints,
        local_reports.LocalReports,
    ],
)
def test_no_other_class_replaces_a_private_method_of_determined(cls: type) -> None:
    assert overridden(cls) == []


def test_planted_private_names_of_determined_are_seen(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(
        "print(context._hparams, own._mine)\nfrom determined.core import _train\n"
    )
    assert sorted(touched(planted)) == ["planted.py:1 _hparams", "planted.py:2 _train"]

    class Planted(api.Session):
        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            return super()._do_request(*args, **kwargs)

    assert overridden(Planted) == ["_do_request"]
