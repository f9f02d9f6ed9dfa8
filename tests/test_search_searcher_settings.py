"""The `searcher` section: what is read from it, and when `adaptive_asha` first compares."""

from __future__ import annotations

from typing import Any

import pytest

from determined_amp.amp.fields import ConfigError
from determined_amp.experiment.experiment import Experiment, parse
from determined_amp.search.searcher_settings import (
    check_lengths,
    read_searcher,
)

ASHA = {
    "name": "adaptive_asha",
    "metric": "validation_loss",
    "smaller_is_better": True,
    "max_trials": 16,
    "time_metric": "batches",
    "max_time": 800,
}


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
    found = read_searcher(searcher, [])
    assert found is not None
    assert found.first_rung() == expected


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"name": "bayes"}, "searcher.name: got 'bayes'; allowed: single, random, grid"),
            ({"max_trails": 3}, "did you mean max_trials?"),
            ({"max_time": None}, "searcher.max_time: missing; adaptive_asha needs it"),
            ({"time_metric": "records"}, "allowed: batches or epochs"),
            ({"divisor": 1}, "searcher.divisor: got 1"),
            ({"divisor": 2.5}, "searcher.divisor: got 2.5"),
            ({"bracket_rungs": [2]}, "use max_rungs"),
            ({"name": "grid"}, "searcher.max_time: given, but grid takes only"),
        ],
    )
    def test_is_named(self, changes: Any, words: str) -> None:
        problems: list[str] = []
        read_searcher({**ASHA, **changes}, problems)
        assert any(words in problem for problem in problems)


class TestLengths:
    def experiment(self, unit: str = "batches", **changes: int) -> Experiment[Any]:
        changed = {"max_length": 800, "validation_period": 50, **changes}
        lengths = {name: {unit: n} for name, n in changed.items()}
        others = {name: {"batches": 50} for name in ("checkpoint_period", "reporting_period")}
        config = {"searcher": ASHA, "hyperparameters": {"training": lengths | others}}
        return parse(config, "search", trial="tests.strangers:Stranger")

    def test_that_fit_pass(self) -> None:
        check_lengths(self.experiment())
        check_lengths(self.experiment(validation_period=25))

    @pytest.mark.parametrize(
        ("unit", "changes", "words"),
        [
            ("batches", {"max_length": 801}, "allowed: {batches: 800}"),
            ("batches", {"validation_period": 51}, "first compares trials after 50 batches"),
            ("epochs", {}, "max_length: is not searcher.max_time"),
        ],
    )
    def test_that_do_not_are_refused(self, unit: str, changes: Any, words: str) -> None:
        with pytest.raises(ConfigError) as refused:
            check_lengths(self.experiment(unit, **changes))
        assert words in str(refused.value)
