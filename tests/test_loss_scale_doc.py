"""docs/loss_scale.md: its commands, files, tests, settings and numbers are the repository's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import loss_scale_choice
from tests.test_amp_doc import missing_tests, named_tests, unknown_settings

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "loss_scale.md").read_text()


def missing_files(text: str) -> set[str]:
    folders = "hp_search|experiment_configs|benchmarks|docs"
    named = set(re.findall(rf"(?<![\w/])(?:{folders})/[\w/]+\.\w+", text))
    named |= {f"docs/{picture}" for picture in re.findall(r"\]\((pictures/[^)]+)\)", text)}
    assert named
    return {name for name in named if not (ROOT / name).exists()}


def test_files_and_pictures_that_are_named_exist() -> None:
    assert missing_files(DOC) == set()
    assert missing_files("hp_search/nothing.yaml ![](pictures/none.png)") == {
        "hp_search/nothing.yaml",
        "docs/pictures/none.png",
    }


def test_commands_exist() -> None:
    modules = set(re.findall(r"python -m ([\w.]+(?<=_amp) \w+|[\w.]+)", DOC))
    assert modules == {
        "benchmarks.loss_scale_choice",
        "determined_amp find",
        "determined_amp search",
        "determined_amp report",
    }
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make (\w+)`", DOC)) <= set(targets)


def test_tests_and_settings_exist() -> None:
    assert named_tests(DOC)
    assert missing_tests(DOC) == set()
    assert unknown_settings(DOC) == set()


def test_every_picture_says_what_made_it() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(pictures/.*?\)\n\n\*.*?\*\n`python -m ", DOC, re.DOTALL)
    assert len(pictures) == DOC.count("](pictures/")


def test_table_is_that_of_the_last_results() -> None:
    results = json.loads(loss_scale_choice.RESULTS.read_text())
    assert loss_scale_choice.markdown(results) in DOC


def test_doc_is_about_two_pages() -> None:
    assert len(DOC.splitlines()) <= 160
