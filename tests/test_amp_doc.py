"""docs/amp.md names tests, metrics, settings and files that exist, and no metric is missing."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from determined_amp.amp.metrics import (
    WARMUP_BATCHES,
    peak_memory_mib,
)
from determined_amp.amp.mixed_precision import MixedPrecision
from determined_amp.audit import Audit
from determined_amp.config.amp import AmpSettings, Precision
from tests.test_metrics import Context

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "amp.md").read_text()


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", DOC, re.DOTALL | re.MULTILINE)
    return str(found)


def rows(text: str) -> list[str]:
    """The first cells of the tables in `text`, without their heads."""
    cells: list[str] = re.findall(r"^\| ?(.*?) ?\|", text, re.MULTILINE)
    rules = [i for i, cell in enumerate(cells) if set(cell) == {"-"}]
    heads = {i - 1 for i in rules}
    return [cell for i, cell in enumerate(cells) if i not in heads.union(rules)]


def named_tests(text: str) -> set[str]:
    return set(re.findall(r"tests/\w+\.py(?:::\w+)+", text))


def missing_tests(text: str) -> set[str]:
    """The tests that `text` names and no file has."""
    named = named_tests(text)
    return {name for name in named if name not in existing_tests(name.partition("::")[0])}


def existing_tests(path: str) -> set[str]:
    if not (ROOT / path).exists():
        return set()
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found.add(f"{path}::{node.name}")
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            found |= {
                f"{path}::{node.name}::{method.name}"
                for method in node.body
                if isinstance(method, ast.FunctionDef) and method.name.startswith("test_")
            }
    return found


def unknown_settings(text: str) -> set[str]:
    """What `text` calls `amp.NAME` and is neither a setting nor a part of `MixedPrecision`."""
    named = set(re.findall(r"`amp\.(\w+)", text))
    return (
        named - {field.name for field in dataclasses.fields(AmpSettings)} - {*dir(MixedPrecision)}
    )


@pytest.fixture
def reportable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of a report in which every number has something to say."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2**20)
    context: Any = Context()
    amp = MixedPrecision(context, AmpSettings(Precision.AMP_FP16))
    training = amp.metrics
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    context.optimizers.append(optimizer)
    training.drifting = frozenset([optimizer])
    parameter.grad = torch.ones(1)
    training.of(optimizer).look([parameter])
    training.of(optimizer).add_norm(torch.ones(()))
    amp.steps(optimizer).count(torch.zeros(()))
    for _ in range(WARMUP_BATCHES + 1):
        training.add(torch.ones(()), 8)
        training.waited(1.0e-9)
    of_slot = {**training.per_slot_reduce(), **peak_memory_mib(torch.device("cuda"))}
    audit = Audit(Precision.FP32, {}, 0, 0, "off", False, tensor_core_share=0.0)
    return {
        *training.cross_slot_reduce([of_slot]),
        *("validation_loss", "validation_accuracy"),  # of this repository's trials
        *audit.metrics(),
    }


def test_metrics_of_the_table_are_those_that_can_be_reported(reportable: set[str]) -> None:
    names = [cell.removesuffix(" *").strip("`") for cell in rows(section("What is reported"))]
    assert len(names) == len(set(names)) > 10
    assert set(names) == reportable


def test_every_test_that_is_named_exists() -> None:
    assert missing_tests(DOC) == set()


def test_each_of_the_thirteen_defects_has_a_test() -> None:
    defects = section("Thirteen defects of other systems")
    assert rows(defects) == [str(number) for number in range(1, 14)]
    for line in re.findall(r"^\| \d.*", defects, re.MULTILINE):
        assert named_tests(line), line


def test_settings_are_those_of_amp() -> None:
    assert unknown_settings(DOC) == set()
    judged = {"min_scale", "max_consecutive_skips", "max_skip_ratio", "on_overflow"}
    assert judged <= set(re.findall(r"`amp\.(\w+)", section("The guard")))


def test_files_and_commands_that_are_named_exist() -> None:
    folders = "determined_amp|trials|experiment_configs"
    named = set(re.findall(rf"(?:{folders})/[\w/]+\.(?:py|yaml)", DOC))
    modules = set(re.findall(r"python -m ([\w.]+(?<=_amp) \w+|[\w.]+)", DOC))
    assert "determined_amp/amp/mixed_precision.py" in named
    assert modules == {"benchmarks.overhead", "determined_amp audit", "determined_amp train"}
    assert not {name for name in named if not (ROOT / name).exists()}


def test_planted_names_are_noticed() -> None:
    """Negative control: of tests, metrics and settings."""
    right = "tests/test_amp_doc.py::test_planted_names_are_noticed"
    in_class = "tests/test_amp.py::TestLossScale::test_follows_growth_and_overflow_exactly"
    wrong = {
        f"{right}_not",
        f"{in_class}_not",
        "tests/test_amp.py::TestLoss::test_follows_growth_and_overflow_exactly",
        "tests/test_nothing.py::test_it",
    }
    assert missing_tests(" ".join([right, in_class, *wrong])) == wrong
    assert rows("| a | b |\n|---|---|\n| `loss` | x |\n| `lost` | y |\n") == ["`loss`", "`lost`"]
    assert unknown_settings("`amp.min_scale` and `amp.min_scales: 2`") == {"min_scales"}


def test_doc_is_short() -> None:
    assert len(DOC.splitlines()) <= 200
