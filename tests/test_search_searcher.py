"""Early stopping decides as the platform's own code does, report by report."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import optuna
import pytest

from determined_amp.config.experiment import Experiment, parse
from determined_amp.config.settings import ConfigError
from determined_amp.search.halving import RungPruner
from determined_amp.search.searcher import (
    Bracket,
    SearcherSettings,
    brackets,
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


def settings(**changes: Any) -> SearcherSettings:
    problems: list[str] = []
    found = read_searcher({**ASHA, **changes}, problems)
    assert problems == []
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # As the platform's own code, compiled, prints them.
        ({"max_trials": 8, "max_time": 400}, [((100, 400), 6), ((400,), 2)]),
        ({"max_time": 937}, [((58, 234, 937), 12), ((234, 937), 4)]),
        ({"max_time": 1600}, [((100, 400, 1600), 12), ((400, 1600), 4)]),
        ({"max_time": 800}, [((50, 200, 800), 12), ((200, 800), 4)]),
        ({"mode": "aggressive"}, [((50, 200, 800), 16)]),
        ({"mode": "conservative"}, [((50, 200, 800), 12), ((200, 800), 3), ((800,), 1)]),
        ({"max_rungs": 2}, [((200, 800), 11), ((800,), 5)]),
        ({"max_trials": 1}, [((800,), 1)]),
        ({"max_trials": 3, "divisor": 1.5, "max_time": 7}, [((3, 4, 7), 2), ((4, 7), 1)]),
    ],
)
def test_brackets_are_those_of_the_platform(changes: Any, expected: Any) -> None:
    found = [(bracket.rungs, bracket.max_trials) for bracket in brackets(settings(**changes))]
    assert found == expected


@dataclass
class PlatformRungs:
    """`asha_stopping.go` of 0.38.1 once more, in its own words: it keeps lists and inserts."""

    rungs: tuple[int, ...]
    divisor: float
    metrics: list[list[float]] = field(default_factory=list)
    trial_rungs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = [[] for _ in self.rungs]

    def validation_completed(self, trial: int, time: int, metric: float) -> bool:
        """Whether the platform stops the trial."""
        for r in range(self.trial_rungs.get(trial, 0), len(self.rungs)):
            self.trial_rungs[trial] = r
            if time < self.rungs[r]:
                return False
            index = sum(other < metric for other in self.metrics[r])
            self.metrics[r].insert(index, metric)
            if r == len(self.rungs) - 1:
                return True
            if index >= max(int(len(self.metrics[r]) / self.divisor), 1):
                return True
        return False

    def crashed(self, trial: int) -> None:
        self.metrics[self.trial_rungs.get(trial, 0)].append(1.7e308)


@pytest.mark.parametrize("divisor", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_pruner_agrees_with_the_platform(divisor: float, smaller_is_better: bool) -> None:
    """Forty trials report in any order, with ties; some crash, some miss a rung."""
    rungs, chance = (4, 12, 36), random.Random(int(divisor))
    pruner = RungPruner([Bracket(rungs, 40)], divisor)
    study = optuna.create_study(
        direction="minimize" if smaller_is_better else "maximize", pruner=pruner
    )
    platform = PlatformRungs(rungs, divisor)
    running: dict[int, tuple[optuna.Trial, int]] = {}
    stopped = 0
    for number in range(40):
        trial = study.ask()
        trial.set_user_attr("bracket", 0)
        running[number] = (trial, 0)
    while running:
        number = chance.choice(sorted(running))
        trial, length = running[number]
        if chance.random() < 0.03:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            platform.crashed(number)
            del running[number]
            continue
        length = min(length + chance.choice([1, 4, 9]), rungs[-1])
        value = chance.randrange(20) / 10
        trial.report(value, length)
        stop = platform.validation_completed(number, length, value if smaller_is_better else -value)
        assert trial.should_prune() == (stop and length < rungs[-1])
        running[number] = (trial, length)
        if stop:
            stopped += length < rungs[-1]
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            del running[number]
    assert stopped > 10


def test_invalid_trials_do_not_count() -> None:
    study = optuna.create_study(pruner=RungPruner([Bracket((1, 2), 9)], 4.0))
    for invalid, value in ((True, 0.1), (False, 0.5)):
        trial = study.ask()
        trial.set_user_attr("bracket", 0)
        trial.set_user_attr("invalid", invalid)
        trial.report(value, 1)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    newest = study.ask()
    newest.set_user_attr("bracket", 0)
    newest.report(0.3, 1)
    assert newest.should_prune() is False  # better than 0.5; 0.1 would have stopped it


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"name": "bayes"}, "searcher.name: got 'bayes'; allowed: single, random, grid"),
            ({"max_trails": 3}, "did you mean max_trials?"),
            ({"max_time": None}, "searcher.max_time: missing; adaptive_asha needs it"),
            ({"time_metric": "records"}, "allowed: batches or epochs"),
            ({"divisor": 1}, "searcher.divisor: got 1"),
            ({"bracket_rungs": [2]}, "use mode and max_rungs"),
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
