"""Private names of torch are in one file, fifteen at most, those of Determined in
two others, and Determined still has them; its loop calls what a loop of ours replaces.

What torch's do is tested by whatever needs it: its clips, steps, hooks and backwards.
"""

import ast
import inspect
import re
from functools import cache
from pathlib import Path

import determined as det
import pytest
from determined import pytorch
from determined.common import api

import determined_amp
from determined_amp.amp import torch_private
from determined_amp.check import doctor
from determined_amp.local import checkpoint_storage, trainer
from determined_amp.trial import controller, determined_private

LIBRARY = sorted(Path(determined_amp.__file__).parent.rglob("*.py"))
OF_TORCH = Path(torch_private.__file__)
OF_DETERMINED = (Path(determined_private.__file__), Path(controller.__file__))
ELSEWHERE = [path for path in LIBRARY if path not in (OF_TORCH, *OF_DETERMINED)]
# A text that may be a name, wherever it stands: in a call, a tuple, a table.
A_NAME = re.compile(r"[a-zA-Z_][\w.]*")
# Those of Python, and what torch documents in its notes on autograd.
PUBLIC = ("_fields", "_getframe", "_exit", "_saved_", "_foreach_")
# Some of the library's own have the same name as one of torch.
OF_BOTH = {"_scale", "_enabled", "_parameters", "_buffers"}
# Notes of `check` on objects of torch, a method that is called on its class, ends of
# words, names of Python and numpy, and a module that torch imports late.
OF_OTHERS = {
    *("_means_cuda", "_scaled_by", "_wrong"),
    *("_length", "_period", "_io", "_NormalAccessor", "_use_fd_functions"),
    *("_core", "_reconstruct", "_dynamo"),
    *("_datasource", "_file_openers", "_TemporaryFileCloser"),
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@cache
def nodes_of(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def names_in(path):
    """Every private attribute, by name, by string, or imported: line, name, and if of
    `self`.
    """
    for node in nodes_of(path):
        names = []
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


@cache
def defined_in(*paths):
    """What files define, or set on an object of their own."""
    found = set()
    for node in (node for path in paths for node in nodes_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_self(node.value) else set()
    return frozenset(found)


def of_others(path):
    """The private names in a file that are torch's or Determined's, as far as one can
    see.
    """
    own, inherited = defined_in(path), defined_in(*ELSEWHERE) - OF_BOTH
    for line, name, is_of_self in names_in(path):
        is_ours = name in own or (is_of_self and name in inherited)
        if not (is_ours or name.startswith(PUBLIC) or name in OF_OTHERS):
            yield f"{path.name}:{line} {name}"


def used_in(path):
    """The private names of a file that it does not define itself."""
    return {name for _, name, _ in names_in(path)} - defined_in(path)


def overridden(cls):
    """The private methods of Determined that a class of ours replaces."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("determined.")]
    theirs = {name for base in bases for name in vars(base)}
    replaced = theirs.intersection(vars(cls)) - {"_abc_impl"}
    return sorted(filter(is_private, replaced))


def test_no_other_file_touches_a_private_name_of_torch_or_determined():
    assert [found for path in ELSEWHERE for found in of_others(path)] == []


def test_private_names_of_torch_are_fifteen_at_most():
    assert len(used_in(OF_TORCH)) <= 15


def test_private_names_that_are_used_are_still_those_of_determined():
    root = Path(det.__file__).parent
    files = (
        path for part in (".", "core", "pytorch") for path in (root / part).glob("*.py")
    )
    words = re.findall(r"\b_[a-zA-Z]\w*", "\n".join(path.read_text() for path in files))
    used = {name for path in OF_DETERMINED for name in used_in(path)}
    own = defined_in(*OF_DETERMINED)
    assert used - own - {*words} == set(), f"gone in {det.__version__}"


@pytest.mark.parametrize(
    "cls",
    [
        controller.SafeController,
        controller.BatchCollector,
        trainer.LocalController,
        doctor.ExaminedController,
    ],
)
def test_private_methods_that_the_library_replaces_are_called_by_determined(cls):
    calls = inspect.getsource(pytorch._PyTorchTrialController)
    assert overridden(cls)
    for name in overridden(cls):
        assert f"self.{name}(" in calls, f"Determined {det.__version__} calls no {name}"


@pytest.mark.parametrize("cls", [checkpoint_storage.LocalCheckpoints, trainer.LocalRun])
def test_no_other_class_replaces_a_private_method_of_determined(cls):
    assert overridden(cls) == []


def test_planted_private_names_are_seen(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text(
        'x._version\ngetattr(x, "_scale")\nfrom torch._guards import detect\n'
        'hooks = [(clip_grad, "_group_tensors")]\nself._mine = 0\nself._losses\n'
        "autocast_mode._cast\n"  # `check/forwards.py` has one of its own
        "context._hparams, own._mine\nfrom determined.core import _train\n"
    )
    of_torch = {"_version", "_scale", "_guards", "_group_tensors", "_cast"}
    found = {found.partition(" ")[2] for found in of_others(planted)}
    assert found == {*of_torch, "_hparams", "_train"}

    class Planted(api.Session):
        def _do_request(self, *args, **kwargs):
            return super()._do_request(*args, **kwargs)

    assert overridden(Planted) == ["_do_request"]
