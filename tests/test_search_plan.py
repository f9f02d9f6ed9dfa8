"""The `searcher` section: what is read from it, and when `adaptive_asha` first compares."""

from __future__ import annotations

from typing import Any

import pytest

from determined_amp.experiment.experiment import parse
from determined_amp.search.search_plan import SearcherSettings, read_searcher, unequal_lengths

ASHA = {
    "name": "adaptive_asha",
    "metric": "validation_loss",
    "smaller_is_better": True,
    "max_trials": 16,
    "time_metric": "batches",
    "max_time": 800,
}


def read(searcher: Any) -> SearcherSettings:
    settings = read_searcher(searcher, [])
    assert settings is not None
    return settings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 50),  # 50, 200, 800
        ({"max_time": 937}, 58),
        ({"max_trials": 3}, 800),  # too few for a second rung
        ({"max_trials": 4}, 200),
        ({"max_rungs": 2}, 200),
        ({"max_trials": 1000, "divisor": 10, "max_time": 1000}, 1),
        ({"max_trials": 1000, "divisor": 2, "max_time": 1600}, 100),
        ({"max_time": 2}, 2),
        ({"name": "random", "time_metric": None, "max_time": None}, 1),
    ],
)
def test_first_rung(changes: Any, expected: int) -> None:
    searcher = {k: v for k, v in {**ASHA, **changes}.items() if v is not None}
    assert read(searcher).first_rung() == expected


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "key"),
        [
            ({"name": "bayes"}, "name"),
            ({"max_trails": 3}, "max_trails"),
            ({"max_time": None}, "max_time"),
            ({"time_metric": "records"}, "time_metric"),
            ({"divisor": 1}, "divisor"),
            ({"divisor": 2.5}, "divisor"),
            ({"bracket_rungs": [2]}, "bracket_rungs"),
            ({"name": "grid"}, "max_time"),  # it has no such key
        ],
    )
    def test_mistake_in_the_searcher_names_its_key(self, changes: Any, key: str) -> None:
        problems: list[Any] = []
        read_searcher({**ASHA, **changes}, problems)
        assert f"searcher.{key}" in {problem.key for problem in problems}


class TestLengths:
    def mistakes(self, unit: str = "batches", **changes: int) -> list[str]:
        """The keys of the lengths that do not fit."""
        changed = {"max_length": 800, "validation_period": 50, **changes}
        lengths = {name: {unit: n} for name, n in changed.items()}
        others = {name: {"batches": 50} for name in ("checkpoint_period", "reporting_period")}
        config = {"searcher": ASHA, "hyperparameters": {"training": lengths | others}}
        experiment = parse(config, "search", trial="tests.strangers:Stranger")
        return [problem.key for problem in unequal_lengths(experiment, read(ASHA))]

    @pytest.mark.parametrize("period", [50, 25])
    def test_lengths_that_fit_pass(self, period: int) -> None:
        assert self.mistakes(validation_period=period) == []

    @pytest.mark.parametrize(
        ("unit", "changes", "key"),
        [
            ("batches", {"max_length": 801}, "max_length"),
            ("batches", {"validation_period": 51}, "validation_period"),
            ("epochs", {}, "max_length"),
        ],
    )
    def test_lengths_that_do_not_fit_are_refused(self, unit: str, changes: Any, key: str) -> None:
        assert self.mistakes(unit, **changes)[0] == f"hyperparameters.training.{key}"
