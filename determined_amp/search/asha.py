"""The early stopping of `adaptive_asha`, as an Optuna pruner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from determined_amp.search.searcher_settings import Bracket


class AshaPruner(optuna.pruners.BasePruner):
    """Stops a trial that is not among the best at a rung, as Determined's `asha_stopping.go` does.

    The rule is from Determined 0.38.1. A trial is judged at its first report at or after a rung.
    Let n be the number of trials that reached the rung, including this one. The trial continues if
    fewer than max(1, n // divisor) of them were better. A stopped trial never continues.
    `optuna.pruners.SuccessiveHalvingPruner` decides by the same rule, but its rungs are the
    smallest rung times powers of an integer. These are not the platform's rungs, and the end of the
    trial is not one of them.

    The user attribute `bracket` is the index of a trial's bracket. Trials report their length in
    the unit of the rungs. A trial with the user attribute `invalid` does not count. A failed trial
    counts as the worst at the next rung that it would have reached.

    Args:
        brackets: The brackets of the search.
        divisor: One in this many trials continues at a rung.
    """

    def __init__(self, brackets: Sequence[Bracket], divisor: float) -> None:
        self._brackets = brackets
        self._divisor = divisor

    def prune(self, study: optuna.study.Study, trial: FrozenTrial) -> bool:
        """Whether to stop `trial` after its newest report."""
        minimise = study.direction == optuna.study.StudyDirection.MINIMIZE
        sign = 1.0 if minimise else -1.0
        *earlier, reached = sorted(trial.intermediate_values)
        value = sign * trial.intermediate_values[reached]
        index = trial.user_attrs["bracket"]
        others = [
            other
            for other in study.get_trials(deepcopy=False)
            if other.number != trial.number and other.user_attrs.get("bracket") == index
        ]
        rungs = self._brackets[index].rungs
        for position, rung in enumerate(rungs[:-1]):
            if max(earlier, default=-1) >= rung or reached < rung:
                continue
            there = list(_values_at(rungs, position, others, sign))
            better = sum(other < value for other in there)
            if better >= max(int((len(there) + 1) / self._divisor), 1):
                return True
        return False


def _values_at(
    rungs: Sequence[int], position: int, trials: Sequence[FrozenTrial], sign: float
) -> Iterator[float]:
    """The values of these trials at a rung; smaller is better."""
    for trial in trials:
        if trial.user_attrs.get("invalid"):
            continue
        lengths = sorted(trial.intermediate_values)
        there = next((length for length in lengths if length >= rungs[position]), None)
        if there is not None:
            yield sign * trial.intermediate_values[there]
        elif trial.state is TrialState.FAIL:
            passed = sum(rung <= max(lengths, default=-1) for rung in rungs)
            if passed == position:
                yield math.inf
