"""`docs/cluster.md` names files, keys and pictures that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from determined_amp.config import experiment
from determined_amp.config.overrides import with_overrides
from tests.test_configs import flat

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
# Determined's own keys, which our YAMLs leave to the platform.
PLATFORM = {"resources.resource_pool"}


def commands() -> list[list[str]]:
    """The words of every command on the page; a line that ends in a backslash goes on."""
    blocks = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_files_exist() -> None:
    named = {Path(name) for name in re.findall(r"[\w./-]+/[\w.-]+\.(?:yaml|png|md)\b", PAGE)}
    assert len(named) > 5
    folders = (ROOT, ROOT / "docs")
    assert not {name for name in named if not any((f / name).exists() for f in folders)}


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/pictures").glob("cluster_*.png")))
def test_pictures_are_shown_and_small(picture: Path) -> None:
    assert f"(pictures/{picture.name})" in PAGE
    assert picture.stat().st_size < 250 * 2**10


def test_overrides_are_of_keys_that_the_yaml_has() -> None:
    checked = 0
    for words in commands():
        overrides = [words[i + 1] for i, word in enumerate(words) if word == "--config"]
        for config in (w for w in words if w.endswith(".yaml") and "=" not in w):
            raw = yaml.safe_load((ROOT / config).read_text())
            keys = {override.partition("=")[0] for override in overrides}
            assert keys <= flat(raw).keys() | PLATFORM, config
            checked += len(keys)
            if config.startswith("experiment_configs"):
                experiment.parse(with_overrides(raw, overrides), config)
    assert checked > 2


def test_make_target_exists() -> None:
    assert "make test-cluster" in PAGE
    assert re.search(r"^test-cluster:", (ROOT / "Makefile").read_text(), re.MULTILINE)
