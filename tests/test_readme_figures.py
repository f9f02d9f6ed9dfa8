"""`benchmarks.readme`: the README's table and picture are those of the committed results."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from benchmarks.gpu import report as gpu_report
from benchmarks.readme import (
    GPU,
    NO_GPU,
    PICTURE,
    README,
    SCALES,
    draw,
    read_precisions,
    table,
    with_gpu,
    with_table,
)
from tests.test_benchmarks_gpu import of_a_gpu


@pytest.fixture(scope="module")
def precisions() -> Any:
    return read_precisions()


def test_table_is_that_of_the_results(precisions: Any) -> None:
    readme = README.read_text()
    assert with_table(readme, table(precisions)) == readme
    other = copy.deepcopy(precisions)
    other["wide MLP"]["precisions"][0]["mean"] = 0.5
    assert with_table(readme, table(other)) != readme


def test_picture_shows_every_speed_and_every_task(precisions: Any) -> None:
    scales = json.loads(SCALES.read_text())
    speed, accuracy, scale = draw(precisions, scales).axes
    shown = {text.get_text() for text in speed.texts}
    (wide,) = precisions["wide MLP"]["comparisons"]
    assert shown == {"fp32", "0.27x", "0.37x", f"{wide['speed']['median']:.2f}x"}
    rows = ["amp_fp16, MLP", "amp_bf16, MLP", "amp_bf16, wide MLP"]
    assert [text.get_text() for text in speed.get_yticklabels()] == rows
    assert len(accuracy.get_yticklabels()) == 3
    bars = [bar for bar in scale.patches if isinstance(bar, Rectangle)]
    assert len(bars) == len(scale.get_yticklabels()) == 8
    by_default = [row["skipped"] for row in scales["rows"] if row["way"] == "2^16"]
    widths = [bar.get_width() for bar in bars]
    assert min(widths) == 0
    assert max(by_default) > max(widths)  # cut off, and written
    assert "200" in {text.get_text() for text in scale.texts}


def test_table_of_a_gpu_is_that_of_its_results_or_not_there() -> None:
    readme = README.read_text()
    if GPU.exists():
        assert with_gpu(readme, json.loads(GPU.read_text())) == readme
    else:
        assert NO_GPU in readme
    found, other = (
        {"machine": {"device": device, "torch": "2.11", "date": "2026-12-01"}, "rows": of_a_gpu()}
        for device in ("NVIDIA H200", "NVIDIA B200")
    )
    first = with_gpu(f"Before. {NO_GPU}\n\nAfter.\n", found)
    said = "On one NVIDIA H200, torch 2.11, 2026-12-01, images on the device:"
    assert first == f"Before. {said}\n\n{gpu_report.table(found)}\nAfter.\n"
    assert with_gpu(first, found) == first
    assert with_gpu(first, other) == first.replace("H200", "B200")


def test_picture_is_in_the_readme() -> None:
    assert PICTURE.exists()
    assert f"({PICTURE.relative_to(README.parent)})" in README.read_text()
