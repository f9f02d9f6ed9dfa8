"""docs/precision.md and the README's table: commands, files, numbers are the repository's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_amp.config.overrides import with_overrides
from determined_amp.reports.precision_comparison import MIN_EFFECT, WAITS_FOR_DATA
from determined_amp.reports.precision_findings import POINTS, SPEED
from tests.test_configs import flat
from tests.test_loss_scale_doc import missing_files

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "precision.md").read_text()
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results" / "precision_mlp_cpu.json"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    return found


def test_files_and_pictures_that_are_named_exist() -> None:
    assert missing_files(DOC) == set()


def test_commands_exist() -> None:
    modules = set(re.findall(r"python -m ([\w.]+(?<=_amp) \w+|[\w.]+)", DOC))
    assert modules == {"determined_amp search", "determined_amp report"}
    assert "\ncompare: " in (ROOT / "Makefile").read_text()


def test_overrides_are_of_keys_that_the_search_has() -> None:
    search = yaml.safe_load((ROOT / "hp_search" / "compare_precisions.yaml").read_text())
    overrides = re.findall(r"--config '?(hyperparameters\.[^'`]+)", DOC)
    assert len(overrides) == 3
    changed = with_overrides(search, overrides)
    assert flat(changed).keys() == flat(search).keys()


def test_limits_are_those_of_the_code() -> None:
    assert f"{SPEED:.1f}x the speed" in DOC
    assert f"{POINTS} points" in DOC
    assert f"by {100 * (MIN_EFFECT - 1):.0f} % or more" in DOC
    assert f"`data_wait_share` above {100 * WAITS_FOR_DATA:g} %" in DOC


def test_what_was_said_of_the_results_is_in_the_doc(results: dict[str, Any]) -> None:
    for sentence in results["sentences"]:
        if " against fp32: " in sentence or sentence.startswith("use "):
            assert f"> {sentence}" in DOC
