"""`benchmarks.readme`: the README's table and picture are those of the committed results."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from benchmarks.readme import (
    PICTURE,
    README,
    SCALES,
    draw,
    read_precisions,
    table,
    with_table,
)


@pytest.fixture(scope="module")
def precisions() -> Any:
    return read_precisions()


def test_table_is_that_of_the_results(precisions: Any) -> None:
    readme = README.read_text()
    assert with_table(readme, table(precisions)) == readme
    other = copy.deepcopy(precisions)
    other["wide MLP"]["precisions"][0]["mean"] = 0.5
    assert with_table(readme, table(other)) != readme


def test_picture_shows_every_speed_and_every_window(precisions: Any) -> None:
    scales = json.loads(SCALES.read_text())
    speed, accuracy, scale = draw(precisions, scales).axes
    shown = {text.get_text() for text in speed.texts}
    (wide,) = precisions["wide MLP"]["comparisons"]
    assert shown == {"fp32", "0.27x", "0.37x", f"{wide['speed']['median']:.2f}x"}
    rows = ["amp_fp16, MLP", "amp_bf16, MLP", "amp_bf16, wide MLP"]
    assert [text.get_text() for text in speed.get_yticklabels()] == rows
    assert len(accuracy.get_yticklabels()) == 3
    bars = [bar for bar in scale.patches if isinstance(bar, Rectangle)]
    windows = [[bar.get_x(), bar.get_x() + bar.get_width()] for bar in bars]
    assert windows == [model["window_log2"] for model in scales["models"]]


def test_picture_is_in_the_readme() -> None:
    assert PICTURE.exists()
    assert f"({PICTURE.relative_to(README.parent)})" in README.read_text()
