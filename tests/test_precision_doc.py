"""docs/precision.md and the README's table: commands, files, numbers are the repository's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_amp.config.overrides import with_overrides
from determined_amp.reports.precision.claims import POINTS, SPEED
from determined_amp.reports.precision.comparison import LEAST_EFFECT
from determined_amp.reports.precision.summary import WAITS_FOR_DATA
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
    assert f"by {100 * (LEAST_EFFECT - 1):.0f} % or more" in DOC
    assert f"`data_wait_share` above {100 * WAITS_FOR_DATA:g} %" in DOC


def test_what_was_said_of_the_results_is_in_the_doc(results: dict[str, Any]) -> None:
    for sentence in results["sentences"]:
        if " against fp32: " in sentence or sentence.startswith("use "):
            assert f"> {sentence}" in DOC


def test_table_of_the_readme_is_that_of_the_results(results: dict[str, Any]) -> None:
    (table,) = re.findall(r"\| precision \| validation accuracy.*?\n\n", README, re.DOTALL)
    shown = dict(re.findall(r"\| `(\w+)` \| (.*) \|", table))
    measured = {found["precision"]: row(found, results) for found in results["precisions"]}
    del measured["tf32"]  # fp32 on a CPU
    assert shown == measured


def row(found: dict[str, Any], results: dict[str, Any]) -> str:
    speed = found["samples_per_second"]
    runs = [run for run in results["runs"] if run["precision"] == found["precision"]]
    return (
        f"{found['mean']:.3f}, {found['standard_deviation']:.3f} "
        f"| {speed['middle']:.0f} ({speed['low']:.0f} to {speed['high']:.0f}) "
        f"| {max(run['skipped_steps'] for run in runs):.0f}"
    )
