"""The README tells the truth: its recipe is the source, its paths and commands exist."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import one_weight
from trials import latte, mlp, resnet50

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def lines_between(function: Callable[..., Any], first: str, last: str) -> list[str]:
    """The source lines of `function` from the one with `first` to the one with `last`."""
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if last in line and i >= start)
    return [line.strip() for line in lines[start : end + 1]]


STEP = ("self.context.backward(", "self.amp.update(")
# Latte clips from a certain step on, and does more after the update.
OF_LATTE = (("self.max_norm()", "self.hparams.max_norm"), ("metrics = self", "return self"))


@pytest.mark.parametrize(
    ("train", "its_own"),
    [
        (resnet50.ResNet50Trial.train_batch, ()),
        (latte.LatteTrial.train_batch, OF_LATTE),
        (one_weight.OneWeightTrial.train_on, (("len(x)", "len(labels)"),)),
    ],
    ids=["resnet50", "latte", "one weight"],
)
def test_every_trial_steps_by_the_same_recipe(
    train: Callable[..., Any], its_own: tuple[tuple[str, str], ...]
) -> None:
    """So that what the one-weight trial proves holds for all."""
    step = "\n".join(lines_between(train, *STEP))
    for own, of_all in its_own:
        assert step.count(own) == 1
        step = step.replace(own, of_all)
    assert step.splitlines() == lines_between(mlp.MLPTrial.train_batch, *STEP)


def test_recipe_in_the_readme_is_the_source() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    source = textwrap.dedent(inspect.getsource(mlp.MLPTrial))
    methods = [part for part in shown.split("\n\n") if part.strip()]
    assert len(methods) == 1
    for method in methods:
        assert textwrap.indent(method.rstrip(), "    ") in source


def test_files_named_in_the_readme_exist() -> None:
    named = set(re.findall(r"[\w./-]+\.(?:yaml|py|sh|md|txt|png)\b", README))
    assert {"experiment_configs/mlp/amp.yaml", "startup-hook.sh"} <= named
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not {name for name in missing if "/" in name or not list(ROOT.rglob(name))}


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert {"run", "test"} <= named
    assert named <= targets


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
