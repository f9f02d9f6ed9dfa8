"""The benchmark of initial loss scales: its ways, its goals, and the published
results.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import loss_scale as bench
from benchmarks import loss_scale_rows as rows
from benchmarks.loss_scale_rows import DEFAULT, FINDER, SEEDS, WAYS, Row
from benchmarks.loss_scale_tasks import TASKS
from determined_amp.amp.plain_data import Config, Values


def row(task: str, way: str, seed: int, **others: Any) -> Row:
    """A training without a fault, whose metric is that of its seed."""
    values: Values = {
        **{"trained_in": "float16", "init_log2": 10, "skipped": 0, "first_applied": 1},
        **{"flushed": 0.0, "metric": 1.0 + seed / 10, "chosen_with": 0, "verdict": ""},
        **{
            "predicted_log2": 17,
            "edge_log2": 17,
            "growth_bits": None,
            "seconds": 1.0,
            "code": "",
        },
    }
    return Row(task, way, seed, **{**values, **others})


def results(**changed: Config) -> list[Row]:
    """All rows; `changed` by way, with `_` instead of what a name may not have."""
    made = [row(t.name, w.name, seed) for t in TASKS for w in WAYS for seed in SEEDS]
    return [replace(each, **changed.get(each.way, {})) for each in made]


def states(made: list[Row]) -> list[int]:
    """On how many tasks each goal is met."""
    return [len(met) for _, met, _ in bench.goals(bench.cells_of(made))]


def test_goals_are_met_where_nothing_is_wrong() -> None:
    made = [replace(r, skipped=10) if r.way == DEFAULT else r for r in results()]
    assert states(made) == [8, 8, 8, 8]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"skipped": 1}, [7, 8, 8, 0]),
        ({"predicted_log2": 15}, [8, 7, 8, 0]),
        ({"metric": 9.0}, [8, 8, 7, 0]),
    ],
)
def test_goal_is_missed_by_a_fault_at_one_seed(fault: Any, expected: list[int]) -> None:
    made = results()
    at = next(i for i, r in enumerate(made) if r.way == FINDER)
    made[at] = replace(made[at], **fault)
    assert states(made) == expected


@pytest.mark.parametrize("task", [TASKS[2], TASKS[5]], ids=lambda task: str(task.name))
def test_a_training_is_repeated_to_the_bit(
    task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "STEPS", 3)
    for way in (WAYS[0], WAYS[-1]):
        first, second = (rows.measure(task, way, 1) for _ in range(2))
        assert replace(first, seconds=0.0) == replace(second, seconds=0.0)
        assert rows.measure(task, way, 2).metric != first.metric
    assert first.trained_in == ("bfloat16" if task is TASKS[5] else "float16")


def test_true_edge_is_where_a_training_skips_its_first_step() -> None:
    task = TASKS[2]
    edge = rows.true_edge(task, 1)
    assert edge is not None
    for at, skips in ((edge, True), (edge - 1, False)):
        choice = rows.Choice(float(at), rule=rows._static())
        training = task.start(1)
        assert (rows._train(training, choice, None).skipped > 0) is skips
    assert rows.true_edge(TASKS[5], 1) is None


def test_published_table_is_that_of_the_published_rows() -> None:
    result = json.loads(bench.PUBLISHED.read_text())
    assert len(result["rows"]) == len(TASKS) * len(WAYS) * len(SEEDS)
    assert bench.PUBLISHED.with_suffix(".md").read_text() == bench.markdown(result)
