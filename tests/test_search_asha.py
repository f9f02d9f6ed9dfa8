"""Early stopping decides as the platform's own code does, report by report."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import optuna
import pytest

from determined_amp.search.asha import AshaPruner
from determined_amp.search.searcher_settings import Bracket


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
    pruner = AshaPruner([Bracket(rungs, 40)], divisor)
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
    study = optuna.create_study(pruner=AshaPruner([Bracket((1, 2), 9)], 4.0))
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
