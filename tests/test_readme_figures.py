"""`benchmarks.readme`: the README's table and picture are those of the committed
results.
"""

import copy
import json
import math

import pytest

from benchmarks.gpu import report as gpu_report
from benchmarks.readme import (
    CHANGES,
    GPU,
    NO_GPU,
    PICTURE,
    README,
    changes,
    read_precisions,
    table,
    with_gpu,
    with_table,
)
from tests.test_benchmarks_gpu import of_a_gpu


@pytest.fixture(scope="module")
def precisions():
    return read_precisions()


def test_table_is_that_of_the_results(precisions):
    readme = README.read_text()
    assert with_table(readme, table(precisions)) == readme
    other = copy.deepcopy(precisions)
    other["wide MLP"]["table"][0]["validation_accuracy"] = "0.5 ± 0.1"
    assert with_table(readme, table(other)) != readme


def test_picture_of_a_comparison_has_the_numbers_of_its_results(precisions):
    for model, name in CHANGES.items():
        assert PICTURE.with_name(name).exists()
        speed, metric = changes(precisions[model])
        pairs = precisions[model]["pairs"]
        logs = [math.log(ratio) for _, ratio in speed.dots]
        assert logs == pytest.approx([pair["speed"]["mean"] for pair in pairs])
        means = [pair["metric"]["mean"] for pair in pairs]
        assert [change for _, change in metric.dots] == means


def test_table_of_a_gpu_is_that_of_its_results_or_not_there():
    readme = README.read_text()
    if GPU.exists():
        assert with_gpu(readme, json.loads(GPU.read_text())) == readme
    else:
        assert NO_GPU in readme
    found, other = (
        {
            "machine": {"device": device, "torch": "2.11", "date": "2026-12-01"},
            "rows": of_a_gpu(),
        }
        for device in ("NVIDIA H200", "NVIDIA B200")
    )
    first = with_gpu(f"Before. {NO_GPU}\n\nAfter.\n", found)
    said = "On one NVIDIA H200, torch 2.11, 2026-12-01, images on the device:"
    assert first == f"Before. {said}\n\n{gpu_report.table(found)}\nAfter.\n"
    assert with_gpu(first, found) == first
    assert with_gpu(first, other) == first.replace("H200", "B200")
