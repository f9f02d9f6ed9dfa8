"""The benchmark of initial loss scales: its ways, its goals, and the published
results.
"""

import json
from dataclasses import replace

from benchmarks import loss_scale as bench
from benchmarks import loss_scale_rows as rows
from benchmarks.loss_scale_rows import SEEDS, WAYS
from benchmarks.loss_scale_tasks import TASKS


def test_a_training_is_repeated_to_the_bit(monkeypatch):
    monkeypatch.setattr(rows, "STEPS", 3)
    first, second, other = (
        rows.measure(TASKS[2], WAYS[-1], seed) for seed in (1, 1, 2)
    )
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)
    assert other.metric != first.metric
    assert first.trained_in == "float16"


def test_published_table_is_that_of_the_published_rows():
    result = json.loads(bench.PUBLISHED.read_text())
    assert len(result["rows"]) == len(TASKS) * len(WAYS) * len(SEEDS)
    assert bench.PUBLISHED.with_suffix(".md").read_text() == bench.markdown(result)
